// Block-scaled FP8 GEMM for at most 64 rows of activations: out (m, n) = a (m, k) w (n, k)^T, DeepGEMM's bits.
//
// Decoding is bound by reading the weight once, so the shape of the work follows the memory: each CTA owns NR weight rows
// (small enough that every multiprocessor gets some) over all of k, and one thread keeps STAGES bulk copies in flight.
// Activations sit on the left of wgmma (64 rows, of which MR are loaded), weights on the right. Splitting k would change
// the order of the sum, hence the bits, and is not done.
//
// A stage of the pipeline holds DEPTH blocks of 128 of k, each operand of it moved by one bulk copy: single blocks are so
// small here that issuing their copies, not memory, would set the pace.
//
// Launched with programmatic stream serialization the kernel may start under the tail of the kernel in front. It then
// loads weights before it waits for that kernel, and everything else after. So the kernel directly in front must not write
// this weight and at the same time let its dependents start early (griddepcontrol.launch_dependents); one that starts
// nothing early may. This kernel starts its own dependents only after its wait, which keeps the rule about one kernel.
//
// Compiled by NVRTC (few_rows_gemm.py) with NR in {16, 32, 64}, MR in {8, 16, 32, 64}, DEPTH, STAGES, OUT_FLOAT in {0, 1}
// and WGMMA(d, a, b, accumulate) defined for NR.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    char opaque[128];
};

constexpr u32 BLOCK_K = 128;
constexpr u32 A_BLOCK = MR * BLOCK_K, A_BYTES = DEPTH * A_BLOCK;
constexpr u32 W_BLOCK = NR * BLOCK_K, W_BYTES = DEPTH * W_BLOCK;
constexpr u32 S_BLOCK = MR * 4, S_COPIED = DEPTH * S_BLOCK, S_BYTES = (S_COPIED + 127) / 128 * 128;
constexpr u32 GROUP = DEPTH < 4 ? DEPTH : 4;  // blocks on the tensor core at a time
constexpr u32 MATH_WARPS = 4;
constexpr u32 ACC = NR / 2;

__device__ __forceinline__ u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_blocks(const TensorMap* map, u32 barrier, u32 destination, int row, int block) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(destination), "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(block) : "memory");
}

__device__ __forceinline__ void copy_scales(const TensorMap* map, u32 barrier, u32 destination, int block) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
            "r"(destination), "l"(map), "r"(barrier), "r"(0), "r"(block) : "memory");
}

// K-major operand with the 128-byte swizzle: groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 operand(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}

__device__ __forceinline__ void hold(float (&d)[ACC]) {
#pragma unroll
    for (u32 i = 0; i < ACC; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void start_block(float (&partial)[ACC], u32 a, u32 w) {
    hold(partial);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (u32 i = 0; i < BLOCK_K / 32; ++i) WGMMA(partial, operand(a + 32 * i), operand(w + 32 * i), i);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    hold(partial);
}

template <int PENDING>
__device__ __forceinline__ void finish_blocks(float (&partial)[ACC]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    hold(partial);
}

__device__ __forceinline__ void add_scaled(float (&total)[ACC], const float (&partial)[ACC], float upper, float lower) {
#pragma unroll
    for (u32 i = 0; i < ACC / 4; ++i) {
        total[4 * i + 0] = fmaf(upper, partial[4 * i + 0], total[4 * i + 0]);
        total[4 * i + 1] = fmaf(upper, partial[4 * i + 1], total[4 * i + 1]);
        total[4 * i + 2] = fmaf(lower, partial[4 * i + 2], total[4 * i + 2]);
        total[4 * i + 3] = fmaf(lower, partial[4 * i + 3], total[4 * i + 3]);
    }
}

template <int J>
__device__ __forceinline__ void add_in_order(float (&total)[ACC], float (&partial)[GROUP][ACC], const float (&upper)[GROUP],
                                             const float (&lower)[GROUP]) {
    finish_blocks<GROUP - 1 - J>(partial[J]);
    add_scaled(total, partial[J], upper[J], lower[J]);
    if constexpr (J + 1 < GROUP) add_in_order<J + 1>(total, partial, upper, lower);
}

#if OUT_FLOAT
typedef float Out;
__device__ __forceinline__ Out narrow(float x) { return x; }
#else
typedef unsigned short Out;
__device__ __forceinline__ Out narrow(float x) {
    Out y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
#endif

__device__ __forceinline__ void store_row(Out* out, const float (&total)[ACC], u32 half, int row, int m, int first, int n) {
    if (row >= m) return;
    Out* at = out + (long long)row * n;
#pragma unroll
    for (u32 i = 0; i < ACC / 4; ++i) {
        const int column = first + 8 * i;
        if (column < n) at[column] = narrow(total[4 * i + 2 * half]);
        if (column + 1 < n) at[column + 1] = narrow(total[4 * i + 2 * half + 1]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * (MATH_WARPS + 1))
few_rows_gemm(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap a_map,
              const __grid_constant__ TensorMap s_map, const float* w_scale, Out* out, int m, int n, int k_blocks) {
    extern __shared__ unsigned char unaligned[];
    const u32 base = (smem_address(unaligned) + 1023) & ~1023u;
    // wgmma reads 64 activation rows whatever MR is; the weights behind keep that inside the allocation.
    const u32 a_at = base, w_at = a_at + STAGES * A_BYTES, s_at = w_at + STAGES * W_BYTES;
    const u32 full = s_at + STAGES * S_BYTES, empty = full + 8 * STAGES;
    const u32 warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int first_row = blockIdx.x * NR;
    const int steps = (k_blocks + DEPTH - 1) / DEPTH;

    if (threadIdx.x == 0) {
#pragma unroll
        for (u32 i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, MATH_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warp == MATH_WARPS) {
        if (lane == 0) {
            const int early = steps < STAGES ? steps : STAGES;
            for (int i = 0; i < early; ++i) {
                barrier_expect(full + 8 * i, A_BYTES + W_BYTES + S_COPIED);
                copy_blocks(&w_map, full + 8 * i, w_at + i * W_BYTES, first_row, i * DEPTH);
            }
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int i = 0; i < early; ++i) {
                copy_blocks(&a_map, full + 8 * i, a_at + i * A_BYTES, 0, i * DEPTH);
                copy_scales(&s_map, full + 8 * i, s_at + i * S_BYTES, i * DEPTH);
            }
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            u32 stage = 0, parity = 0;
            for (int i = early; i < steps; ++i) {
                const u32 barrier = full + 8 * stage;
                barrier_wait(empty + 8 * stage, parity);
                barrier_expect(barrier, A_BYTES + W_BYTES + S_COPIED);
                copy_blocks(&w_map, barrier, w_at + stage * W_BYTES, first_row, i * DEPTH);
                copy_blocks(&a_map, barrier, a_at + stage * A_BYTES, 0, i * DEPTH);
                copy_scales(&s_map, barrier, s_at + stage * S_BYTES, i * DEPTH);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }

    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const u32 upper_row = warp * 16 + lane / 4, lower_row = upper_row + 8;
    // NR divides 128, so the CTA's rows share one weight scale per 128 of k.
    const float* scale_row = w_scale + (long long)(first_row / 128) * k_blocks;
    float total[ACC] = {}, partial[GROUP][ACC] = {};
    u32 stage = 0, parity = 0;

    for (int i = 0; i < steps; ++i) {
        const u32 a_stage = a_at + stage * A_BYTES, w_stage = w_at + stage * W_BYTES, s_stage = s_at + stage * S_BYTES;
        float scales[DEPTH];
#pragma unroll
        for (u32 j = 0; j < DEPTH; ++j) {
            const int block = i * DEPTH + j;
            scales[j] = block < k_blocks ? __ldg(scale_row + block) : 0.0f;
        }
        barrier_wait(full + 8 * stage, parity);
#pragma unroll
        for (u32 g = 0; g < DEPTH; g += GROUP) {
            // Blocks past the end were filled with zeros, and so were their scales: they add nothing.
            float upper[GROUP], lower[GROUP];
#pragma unroll
            for (u32 j = 0; j < GROUP; ++j) start_block(partial[j], a_stage + (g + j) * A_BLOCK, w_stage + (g + j) * W_BLOCK);
#pragma unroll
            for (u32 j = 0; j < GROUP; ++j) {
                float a_upper = 0, a_lower = 0;
                const u32 at = s_stage + (g + j) * S_BLOCK;
                if (upper_row < MR) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(a_upper) : "r"(at + 4 * upper_row));
                if (lower_row < MR) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(a_lower) : "r"(at + 4 * lower_row));
                upper[j] = a_upper * scales[g + j], lower[j] = a_lower * scales[g + j];
            }
            // In order: each block is added only after the one before it.
            add_in_order<0>(total, partial, upper, lower);
        }
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    const int first_column = first_row + 2 * (lane % 4);
    store_row(out, total, 0, upper_row, m, first_column, n);
    store_row(out, total, 1, lower_row, m, first_column, n);
}
