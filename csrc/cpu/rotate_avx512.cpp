#if defined(__x86_64__)
#define ROPE_ISA isa_avx512
#define ROPE_VECTOR_BYTES 64
#define ROPE_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"
#include "rotate.inl"
#endif
