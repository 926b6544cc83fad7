//! `attention_bwd_dkdv` and `attention_bwd_dq`: their launches, and whether their results from
//! exact statistics are right.

use burst_attention_kernels::instances::Kernel;
use burst_attention_kernels::launch::{KeyGrads, MAX_VIEW_BYTES, QueryGrads};

use super::case::Case;
use super::feature_arrays::FeatureArrays;
use super::problem::{Found, Output, Problem};
use super::world::{Array, Change, Scalar, Stores, World};

/// The arrays that the kernels read.
pub struct Read {
    pub q: Array,
    pub k: Array,
    pub v: Array,
    pub dout: Array,
    pub lse_log2: Array,
    pub delta: Array,
    pub feature_arrays: FeatureArrays,
}

impl Read {
    pub fn new(world: &mut World, problem: &Problem, kernel: Kernel) -> Read {
        let Case { batch, q_len, kv_len, heads, kv_heads, head_dim, margin, .. } = problem.case;
        let (queries, keys) =
            ([batch, q_len, heads, head_dim], [batch, kv_len, kv_heads, head_dim]);
        let value_dim = problem.case.value_dim();
        let (results, values) =
            ([batch, q_len, heads, value_dim], [batch, kv_len, kv_heads, value_dim]);
        let (activation, statistics) =
            (Scalar::Activation(problem.case.element), [batch, q_len, heads]);
        let keys_stream = kernel == Kernel::QueryGrads;
        let queries_read = if keys_stream { 0..q_len } else { problem.visited_queries(kernel) };
        let keys_read = if keys_stream { problem.visited_keys(kernel) } else { 0..kv_len };
        let read = Read {
            q: world.rows("q", activation, queries, margin),
            k: world.rows("k", activation, keys, 2 * margin),
            v: world.rows("v", activation, values, 2 * margin),
            dout: world.rows("dout", activation, results, margin),
            lse_log2: world.statistics("lse_log2", statistics, margin),
            delta: world.statistics("delta", statistics, margin),
            feature_arrays: FeatureArrays::new(world, problem, kernel),
        };
        let memory = &mut world.memory;
        read.q.fill(memory, queries_read.clone(), &problem.inputs.q);
        read.dout.fill(memory, queries_read.clone(), &problem.inputs.dout);
        read.lse_log2.fill(memory, queries_read.clone(), &problem.saved.lse_log2);
        read.delta.fill(memory, queries_read, &problem.saved.delta);
        read.k.fill(memory, keys_read.clone(), &problem.inputs.k);
        read.v.fill(memory, keys_read, &problem.inputs.v);
        read
    }

    pub fn audit(&self, world: &World) -> Result<(), String> {
        let Read { q, k, v, dout, lse_log2, delta, feature_arrays } = self;
        feature_arrays.audit(world)?;
        world.audit(&[q, k, v, dout, lse_log2, delta].map(|array| (array, Stores::Never)))
    }
}

/// Returns the arrays that one kernel wrote last, results or accumulators, after an audit of both.
fn outputs(
    case: &Case,
    world: &World,
    pairs: &[(&Array, &Array)],
) -> Result<Vec<Vec<f32>>, String> {
    let (carried, results) = (world.carries(case.finished), Stores::Exactly(case.finished.into()));
    let mut outputs = vec![];
    for &(accumulator, result) in pairs {
        world.audit(&[(accumulator, carried), (result, results)])?;
        let written = if case.finished { result } else { accumulator };
        outputs.push(written.read(&world.memory));
    }
    Ok(outputs)
}

fn is_alone(case: &Case) -> bool {
    case.steps.len() <= 1 && case.finished && case.limit == MAX_VIEW_BYTES
}

pub fn run_keys(
    problem: &Problem,
    seed: u64,
    change: Change,
) -> Result<(Vec<Vec<f32>>, usize), String> {
    let mut world = World::new(seed, change);
    let outputs = add_key_grads(&mut world, problem, None)?;
    Ok((outputs, world.launches()))
}

/// Runs a chain of launches for dk and dv. With `dq_acc` they add to it too.
pub fn add_key_grads(
    world: &mut World,
    problem: &Problem,
    dq_acc: Option<&Array>,
) -> Result<Vec<Vec<f32>>, String> {
    let case = &problem.case;
    let Case { batch, kv_len, kv_heads, head_dim, margin, element, .. } = *case;
    let read = Read::new(world, problem, Kernel::KeyGrads);
    let mut place = |name, scalar, dim, margins| {
        world.rows(name, scalar, [batch, kv_len, kv_heads, dim], margins * margin)
    };
    let activation = Scalar::Activation(element);
    let dk_acc = place("dk_acc", Scalar::F32, head_dim, 3);
    let dv_acc = place("dv_acc", Scalar::F32, case.value_dim(), 3);
    let dk = place("dk", activation, head_dim, 5);
    let dv = place("dv", activation, case.value_dim(), 5);
    let steps = case.ranges(case.q_len);
    for (n, queries) in steps.iter().enumerate() {
        let description = KeyGrads {
            rectangle: case.rectangle(queries, &(0..kv_len)),
            features: read.feature_arrays.features(case, queries.start, 0),
            q: read.q.rows(queries.start),
            k: read.k.rows(0),
            v: read.v.rows(0),
            dout: read.dout.rows(queries.start),
            lse_log2: read.lse_log2.statistics(queries.start),
            delta: read.delta.statistics(queries.start),
            dk_acc: (!is_alone(case)).then(|| dk_acc.rows(0)),
            dv_acc: (!is_alone(case)).then(|| dv_acc.rows(0)),
            dq_acc: dq_acc.map(|array| array.rows(queries.start)),
            dk: case.finished.then(|| dk.rows(0)),
            dv: case.finished.then(|| dv.rows(0)),
            fixed_order: false,
            results: None,
            first: n == 0,
            last: case.finished && n + 1 == steps.len(),
        };
        let chain = description.launches_within(case.target, case.limit);
        let chain = chain.map_err(|error| error.to_string())?;
        world.run(chain, |_| None)?;
    }
    read.audit(world)?;
    outputs(case, world, &[(&dk_acc, &dk), (&dv_acc, &dv)])
}

pub fn run_queries(
    problem: &Problem,
    seed: u64,
    change: Change,
) -> Result<(Vec<Vec<f32>>, usize), String> {
    let case = &problem.case;
    let Case { batch, q_len, heads, head_dim, margin, element, .. } = *case;
    let mut world = World::new(seed, change);
    let read = Read::new(&mut world, problem, Kernel::QueryGrads);
    let sizes = [batch, q_len, heads, head_dim];
    let dq_acc = world.rows("dq_acc", Scalar::F32, sizes, 3 * margin);
    let dq = world.rows("dq", Scalar::Activation(element), sizes, 5 * margin);
    let dslopes = world.rows("dslopes", Scalar::F32, [batch, q_len, heads, 1], 3 * margin / 2);
    if case.slopes {
        dslopes.fill(&mut world.memory, 0..q_len, &vec![0.0; batch * q_len * heads]);
    }
    let steps = case.ranges(case.kv_len);
    for (n, keys) in steps.iter().enumerate() {
        let description = QueryGrads {
            rectangle: case.rectangle(&(0..q_len), keys),
            features: read.feature_arrays.features(case, 0, keys.start),
            q: read.q.rows(0),
            k: read.k.rows(keys.start),
            v: read.v.rows(keys.start),
            dout: read.dout.rows(0),
            lse_log2: read.lse_log2.statistics(0),
            delta: read.delta.statistics(0),
            dq_acc: (!is_alone(case)).then(|| dq_acc.rows(0)),
            dq: case.finished.then(|| dq.rows(0)),
            dslopes: case.slopes.then(|| dslopes.rows(0)),
            first: n == 0,
            last: case.finished && n + 1 == steps.len(),
        };
        let chain = description.launches_within(case.target, case.limit);
        let chain = chain.map_err(|error| error.to_string())?;
        world.run(chain, |_| None)?;
    }
    read.audit(&world)?;
    let mut outputs = outputs(case, &world, &[(&dq_acc, &dq)])?;
    // Each launch of a row reads and writes it, the first launch like the last.
    world.audit(&[(&dslopes, if case.slopes { world.carries(false) } else { Stores::Never })])?;
    outputs.extend(case.slopes.then(|| dslopes.read(&world.memory)));
    Ok((outputs, world.launches()))
}

pub fn check_keys(problem: &Problem, change: Change) -> Result<Found, String> {
    let (outputs, launches) = problem.twice(|seed| run_keys(problem, seed, change))?;
    let [dk, dv] = &outputs[..] else { panic!("dk and dv, got {} outputs", outputs.len()) };
    Ok(Found { worst: compare_keys(problem, dk, dv)?, launches })
}

/// Returns the worst ratio of errors of dk and dv.
pub fn compare_keys(problem: &Problem, dk: &[f32], dv: &[f32]) -> Result<f64, String> {
    let (exact, plain) = (&problem.exact, &problem.plain);
    let (floor, of_queries) =
        (problem.gradient_floor(1.0), problem.gradient_floor(problem.case.magnitude));
    problem.zero("dk", dk, |at| problem.unseen(at))?;
    problem.zero("dv", dv, |at| problem.unseen(at))?;
    let dk = Output { name: "dk", got: dk, exact: &exact.dk, plain: &plain.dk, floor: of_queries };
    let dv = Output { name: "dv", got: dv, exact: &exact.dv, plain: &plain.dv, floor };
    Ok(problem.ratio(&dk)?.max(problem.ratio(&dv)?))
}

pub fn check_queries(problem: &Problem, change: Change) -> Result<Found, String> {
    let (outputs, launches) = problem.twice(|seed| run_queries(problem, seed, change))?;
    let mut worst = compare_dq(problem, &outputs[0])?;
    if let Some(got) = outputs.get(1) {
        let (exact, plain) = (&problem.exact.dslopes, &problem.plain.dslopes);
        let floor = problem.gradient_floor(problem.farthest()) / f64::from(problem.case.scale());
        worst = worst.max(problem.ratio(&Output { name: "dslopes", got, exact, plain, floor })?);
    }
    Ok(Found { worst, launches })
}

/// Returns the ratio of errors of dq.
pub fn compare_dq(problem: &Problem, dq: &[f32]) -> Result<f64, String> {
    let (exact, plain, floor) = (&problem.exact.dq, &problem.plain.dq, problem.gradient_floor(1.0));
    problem.zero("dq", dq, |at| problem.blind(at))?;
    problem.ratio(&Output { name: "dq", got: dq, exact, plain, floor })
}
