//! Short kernels for the interpreter to run.

use cutile_compiler::compile_api::KernelCompiler;
use cutile_ir::Module;

/// Returns the module of an entry with the given constants.
pub fn compile(entry: &'static str, constants: &[usize]) -> Module {
    let constants = constants.iter().map(usize::to_string).collect();
    let compile = move || {
        let artifacts = KernelCompiler::new(kernels::__module_ast_self, "kernels", entry)
            .target("sm_90")
            .generics(constants)
            .compile()
            .expect("the sample compiles");
        artifacts.module().clone()
    };
    // The compiler's front end recurses deeply.
    let thread = std::thread::Builder::new().stack_size(256 << 20).spawn(compile);
    thread.unwrap().join().unwrap()
}

#[cutile::module]
pub mod kernels {
    use cutile::core::*;

    unsafe fn rows<E: ElementType>(
        base: *mut E,
        heads: i32,
        length: i32,
        dim: i32,
    ) -> Tensor<E, { [-1, -1, -1] }> {
        let head_stride: i32 = length * dim;
        let shape: Shape<{ [-1, -1, -1] }> =
            Shape::<{ [-1, -1, -1] }> { dims: &[heads, length, dim] };
        let strides: Array<{ [-1, -1, 1] }> =
            Array::<{ [-1, -1, 1] }> { dims: &[head_stride, dim] };
        let base: PointerTile<*mut E, { [] }> = pointer_to_tile(base);
        unsafe { make_tensor_view(base, shape, strides, new_token_unordered()) }
    }

    /// Computes one tile of queries of one head, over all keys up to its own position. The grid is
    /// (tiles, heads).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn causal<const BM: i32, const BN: i32, const D: i32>(
        q: *mut bf16,
        k: *mut bf16,
        v: *mut bf16,
        o: *mut f32,
        heads: i32,
        length: i32,
        scale_log2: f32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let q_view: Tensor<bf16, { [-1, -1, -1] }> = unsafe { rows(q, heads, length, D) };
        let k_view: Tensor<bf16, { [-1, -1, -1] }> = unsafe { rows(k, heads, length, D) };
        let v_view: Tensor<bf16, { [-1, -1, -1] }> = unsafe { rows(v, heads, length, D) };
        let o_view: Tensor<f32, { [-1, -1, -1] }> = unsafe { rows(o, heads, length, D) };
        let transpose: Array<{ [1, 0] }> = Array::<{ [1, 0] }> { dims: &[1i32, 0i32] };
        let k_part = k_view.partition(const_shape![1, BN, D]);
        let v_part = v_view.partition(const_shape![1, BN, D]);
        let tq: Tile<bf16, { [1, BM, D] }> =
            q_view.partition(const_shape![1, BM, D]).load([pid.1, pid.0, 0i32]);
        let tq: Tile<bf16, { [BM, D] }> = tq.reshape(const_shape![BM, D]);
        let scale: Tile<f32, { [BM, BN] }> = scale_log2.broadcast(const_shape![BM, BN]);
        let mut highest: Tile<f32, { [BM, 1] }> = constant(-1.0e30f32, const_shape![BM, 1]);
        let mut total: Tile<f32, { [BM, 1] }> = constant(0.0f32, const_shape![BM, 1]);
        let mut acc: Tile<f32, { [BM, D] }> = constant(0.0f32, const_shape![BM, D]);
        let first: i32 = pid.0 * BM;
        let tiles: i32 = ceil_div(min(first + BM, length), BN);
        for j in 0i32..tiles {
            let tk: Tile<bf16, { [1, BN, D] }> = k_part.load([pid.1, j, 0i32]);
            let kt: Tile<bf16, { [D, BN] }> = permute(tk.reshape(const_shape![BN, D]), transpose);
            let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, const_shape![BM, BN]);
            let s: Tile<f32, { [BM, BN] }> = mma(tq, kt, zero);
            let row: Tile<i32, { [BM] }> = iota(const_shape![BM]);
            let row: Tile<i32, { [BM, BN] }> =
                row.reshape(const_shape![BM, 1]).broadcast(const_shape![BM, BN]);
            let column: Tile<i32, { [BN] }> = iota(const_shape![BN]);
            let column: Tile<i32, { [BM, BN] }> =
                column.reshape(const_shape![1, BN]).broadcast(const_shape![BM, BN]);
            let shift: i32 = first - j * BN;
            let row: Tile<i32, { [BM, BN] }> = row + shift.broadcast(const_shape![BM, BN]);
            let hidden: Tile<f32, { [BM, BN] }> = constant(-1.0e30f32, const_shape![BM, BN]);
            let s: Tile<f32, { [BM, BN] }> = select(ge_tile(row, column), s * scale, hidden);
            let peak: Tile<f32, { [BM] }> = reduce_max(s, 1i32);
            let peak: Tile<f32, { [BM, 1] }> = max_tile(highest, peak.reshape(const_shape![BM, 1]));
            let p: Tile<f32, { [BM, BN] }> =
                exp2(s - peak.broadcast(const_shape![BM, BN]), ftz::Enabled);
            let fade: Tile<f32, { [BM, 1] }> = exp2(highest - peak, ftz::Enabled);
            let sum: Tile<f32, { [BM] }> = reduce_sum(p, 1i32);
            total = total * fade + sum.reshape(const_shape![BM, 1]);
            let tv: Tile<bf16, { [1, BN, D] }> = v_part.load([pid.1, j, 0i32]);
            let p16: Tile<bf16, { [BM, BN] }> = convert_tile(p);
            acc = mma(
                p16,
                tv.reshape(const_shape![BN, D]),
                acc * fade.broadcast(const_shape![BM, D]),
            );
            highest = peak;
        }
        let out: Tile<f32, { [BM, D] }> = true_div(acc, total.broadcast(const_shape![BM, D]));
        let mut part = unsafe { o_view.partition_full_mut(const_shape![1, BM, D]) };
        unsafe { part.store_unchecked(out.reshape(const_shape![1, BM, D]), [pid.1, pid.0, 0i32]) };
    }

    /// Adds row tile pid.1 of part pid.0 to the row tile of the sum, which may have fewer columns.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn add<const BM: i32, const D: i32>(
        parts: *mut f32,
        sum: *mut f32,
        count: i32,
        length: i32,
        columns: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let parts_view: Tensor<f32, { [-1, -1, -1] }> = unsafe { rows(parts, count, length, D) };
        let sum_view: Tensor<f32, { [-1, -1, -1] }> = unsafe { rows(sum, 1i32, length, columns) };
        let part: Tile<f32, { [1, BM, D] }> =
            parts_view.partition(const_shape![1, BM, D]).load([pid.0, pid.1, 0i32]);
        let sum_tiles = unsafe { sum_view.partition_full_mut(const_shape![1, BM, D]) };
        let _done: Token = unsafe {
            atomic_red_view_raw(
                &sum_tiles,
                part,
                [0i32, pid.1, 0i32],
                atomic::AddF,
                ordering::Relaxed,
                scope::Device,
                None,
            )
        };
    }
}
