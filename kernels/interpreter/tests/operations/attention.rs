//! A whole kernel of cuTile's compiler, compared with dense attention in float64.

use burst_attention_interpreter::{Address, Argument, Fault, GridRun, Memory};
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{Attribute, OpId, RegionId};
use half::bf16;

fn compile(sizes: [usize; 3]) -> Module {
    super::sample::compile("causal", &sizes)
}

struct Problem {
    heads: usize,
    length: usize,
    dim: usize,
    memory: Memory,
    tensors: [Address; 4],
    inputs: [Vec<f32>; 3],
}

fn problem(heads: usize, length: usize, dim: usize) -> Problem {
    let count = heads * length * dim;
    let mut memory = Memory::new();
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / (1 << 22) as f32 - 2.0)
    };
    let mut at = vec![];
    let inputs = ["q", "k", "v"].map(|name| {
        let values: Vec<bf16> = (0..count).map(|_| random()).collect();
        at.push(memory.allocate(name, 2 * count as u64));
        memory.write_bf16(*at.last().unwrap(), &values);
        values.into_iter().map(bf16::to_f32).collect()
    });
    let tensors = [at[0], at[1], at[2], memory.allocate("o", 4 * count as u64)];
    memory.set_audit(true);
    Problem { heads, length, dim, memory, tensors, inputs }
}

impl Problem {
    fn run(&mut self, module: &Module, bm: usize) -> Result<Vec<f32>, Fault> {
        let mut arguments: Vec<_> = self.tensors.map(Argument::Pointer).into();
        let scale = std::f32::consts::LOG2_E / (self.dim as f32).sqrt();
        arguments.extend([Argument::I32(self.heads as i32), Argument::I32(self.length as i32)]);
        arguments.push(Argument::F32(scale));
        let grid = [self.length.div_ceil(bm) as u32, self.heads as u32, 1];
        let launch = GridRun { operation_limit: 1 << 20, ..GridRun::default() };
        let outcome = launch.run(module, "causal_entry", grid, &arguments, &mut self.memory);
        outcome.map_err(|error| error.fault().expect("an operation failed").clone())?;
        Ok(self.memory.read_f32(self.tensors[3], self.inputs[0].len()))
    }

    fn expected(&self) -> Vec<f64> {
        let [q, k, v] = &self.inputs;
        let (n, d) = (self.length, self.dim);
        let mut out = vec![];
        for row in 0..self.heads * n {
            let first = row / n * n;
            let keys = first..=row;
            let dot = |key: usize| -> f64 {
                (0..d).map(|x| f64::from(q[row * d + x]) * f64::from(k[key * d + x])).sum()
            };
            let weights: Vec<f64> =
                keys.clone().map(|key| (dot(key) / (d as f64).sqrt()).exp()).collect();
            let total: f64 = weights.iter().sum();
            for x in 0..d {
                let terms =
                    keys.clone().zip(&weights).map(|(key, w)| w * f64::from(v[key * d + x]));
                out.push(terms.sum::<f64>() / total);
            }
        }
        out
    }
}

fn farthest(got: &[f32], expected: &[f64]) -> f64 {
    let distance = |(&x, y): (&f32, &f64)| (f64::from(x) - y).abs();
    got.iter().zip(expected).map(distance).fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a })
}

/// The allowed error. Rounding the weights to bfloat16 costs at most 2^-9 of values below 2, and as
/// much of their sum.
const TOLERANCE: f64 = 4.0 / 256.0;

#[test]
fn causal_attention_agrees_with_float64_at_every_length() {
    let module = compile([16, 32, 16]);
    for length in [1, 16, 31, 48, 77, 100] {
        let mut problem = problem(2, length, 16);
        let got = problem.run(&module, 16).unwrap();
        let error = farthest(&got, &problem.expected());
        assert!(error < TOLERANCE, "length {length}: {error}");
        let [q, k, v, o] = problem.tensors;
        let count = got.len();
        assert!(problem.memory.stores(o, count, 4).iter().all(|&stores| stores == 1));
        for input in [q, k, v] {
            assert!(problem.memory.stores(input, count, 2).iter().all(|&stores| stores == 0));
        }
    }
}

/// Returns all operations of a region, with nested operations.
fn operations(module: &Module, region: RegionId) -> Vec<OpId> {
    let blocks = &module.region(region).blocks;
    let direct = blocks.iter().flat_map(|&block| &module.block(block).ops);
    direct
        .flat_map(|&id| {
            let nested =
                module.op(id).regions.iter().flat_map(|&region| operations(module, region));
            std::iter::once(id).chain(nested)
        })
        .collect()
}

fn find(module: &Module, opcode: Opcode) -> Vec<OpId> {
    let body = module.op(module.functions[0]).regions[0];
    let all = operations(module, body);
    all.into_iter().filter(|&id| module.op(id).opcode == opcode).collect()
}

#[test]
fn a_changed_kernel_gives_other_numbers() {
    let module = compile([16, 32, 16]);
    type Mutation = fn(&mut Module);
    let mutations: [(&str, Mutation); 4] = [
        ("mask dropped", |module| {
            let id = find(module, Opcode::Select)[0];
            let op = module.op_mut(id);
            op.operands[2] = op.operands[1];
        }),
        ("maximum for sum", |module| {
            let sum = find(module, Opcode::Reduce)[1];
            let body = module.op(sum).regions[0];
            let id = operations(module, body)[0];
            assert_eq!(module.op(id).opcode, Opcode::AddF);
            let op = module.op_mut(id);
            op.opcode = Opcode::MaxF;
            op.attributes.clear();
        }),
        ("operands of a product swapped", |module| {
            let id = find(module, Opcode::SubF)[0];
            module.op_mut(id).operands.swap(0, 1);
        }),
        ("constant changed", |module| {
            for id in find(module, Opcode::Constant) {
                for (_, value) in &mut module.op_mut(id).attributes {
                    if let Attribute::DenseElements(dense) = value
                        && dense.data == (-1.0e30f32).to_le_bytes()
                    {
                        dense.data = 0f32.to_le_bytes().into();
                    }
                }
            }
        }),
    ];
    for (name, mutate) in mutations {
        let mut changed = module.clone();
        mutate(&mut changed);
        let mut problem = problem(1, 48, 16);
        let expected = problem.expected();
        let got = problem.run(&changed, 16).unwrap();
        let error = farthest(&got, &expected);
        assert!(error > TOLERANCE || error.is_nan(), "{name}: {error}");
    }
}

#[test]
fn a_length_that_memory_does_not_back_is_caught() {
    let module = compile([16, 32, 16]);
    let mut problem = problem(1, 40, 16);
    problem.length = 41;
    let fault = problem.run(&module, 16).unwrap_err();
    assert!(matches!(fault, Fault::OutOfBounds { .. }), "{fault}");
}
