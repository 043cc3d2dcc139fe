// The baseline of the architecture: SSE2 on x86-64, NEON on aarch64.
#define ROPE_ISA isa_default
#define ROPE_VECTOR_BYTES 16
#include "rotate.inl"
