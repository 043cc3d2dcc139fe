#if defined(__x86_64__)
#define ROPE_ISA isa_avx2
#define ROPE_VECTOR_BYTES 32
#define ROPE_TARGET "avx2,fma,f16c"
#include "rotate.inl"
#endif
