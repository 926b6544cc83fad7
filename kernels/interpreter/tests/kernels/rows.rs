//! `delta`, `cast`, `accumulate`, `add_gradient` and `pack_lse`: their launches, and whether their
//! results are right.

use burst_attention_kernels::launch::{Accumulate, AddGradient, Cast, Delta, PackLse};

use super::case::{CASE, Case, Random, round};
use super::combine_softmax;
use super::coverage::Group;
use super::fold_result;
use super::problem::{Found, Problem};
use super::world::{Change, Scalar, Stores, World};

pub fn run_delta(
    problem: &Problem,
    seed: u64,
    change: Change,
) -> Result<(Vec<Vec<f32>>, usize), String> {
    let Case { batch, q_len, heads, margin, element, second, .. } = problem.case;
    let head_dim = problem.case.value_dim();
    let mut world = World::new(seed, change);
    let sizes = [batch, q_len, heads, head_dim];
    let [o, dout] =
        ["o", "dout"].map(|name| world.rows(name, Scalar::Activation(element), sizes, margin));
    let per_row = [batch, q_len, heads, 1];
    let [lse, dlse] =
        ["lse", "dlse"].map(|name| world.rows(name, Scalar::F32, per_row, 3 * margin / 2));
    let [lse_log2, delta] =
        ["lse_log2", "delta"].map(|name| world.statistics(name, [batch, q_len, heads], margin));
    let zeros = world.rows("zeros", Scalar::F32, sizes, 2 * margin);
    o.fill(&mut world.memory, 0..q_len, &problem.saved.o);
    dout.fill(&mut world.memory, 0..q_len, &problem.inputs.dout);
    lse.fill(&mut world.memory, 0..q_len, &problem.saved.lse);
    if second {
        dlse.fill(&mut world.memory, 0..q_len, &problem.inputs.dlse);
    }
    let description = Delta {
        batch,
        q_len,
        heads,
        head_dim,
        element,
        o: o.rows(0),
        dout: dout.rows(0),
        lse: lse.rows(0),
        dlse: second.then(|| dlse.rows(0)),
        lse_log2: lse_log2.statistics(0),
        delta: delta.statistics(0),
        zeros: second.then(|| zeros.rows(0)),
    };
    let chain = description.launches_within(problem.case.target, problem.case.limit);
    let chain = chain.map_err(|error| error.to_string())?;
    let launches = chain.len();
    world.run(chain, |_| None)?;
    world.audit(&[&o, &dout, &lse, &dlse].map(|array| (array, Stores::Never)))?;
    world.audit(&[&lse_log2, &delta].map(|array| (array, Stores::Exactly(1))))?;
    world.audit(&[(&zeros, Stores::Exactly(second.into()))])?;
    if second && zeros.read(&world.memory).iter().any(|x| x.to_bits() != 0) {
        return Err("zeros are not all 0".into());
    }
    Ok((vec![lse_log2.read(&world.memory), delta.read(&world.memory)], launches))
}

/// Checks that each delta is within the error of a float32 sum, and each lse within the error of
/// one product; `worst` is the largest share of the allowed error.
pub fn check_delta(problem: &Problem, change: Change) -> Result<Found, String> {
    let (outputs, launches) = problem.twice(|seed| run_delta(problem, seed, change))?;
    let (case, dim) = (&problem.case, problem.case.value_dim());
    let step = 2f64.powi(-24);
    let mut worst = 0f64;
    for (at, (&lse_log2, &delta)) in outputs[0].iter().zip(&outputs[1]).enumerate() {
        let o = problem.saved.o[at * dim..][..dim].iter().map(|&o| f64::from(o));
        let terms = o.zip(&problem.inputs.dout[at * dim..]).map(|(o, &dout)| o * f64::from(dout));
        let dlse = if case.second { f64::from(problem.inputs.dlse[at]) } else { 0.0 };
        let (sum, size) =
            terms.fold((-dlse, dlse.abs()), |(sum, size), term| (sum + term, size + term.abs()));
        // The error of a sum of n terms is about √n steps of its size; 2^-64 is for an exact 0.
        let bound = step * size * (dim as f64).sqrt() + 2f64.powi(-64);
        worst = worst.max((f64::from(delta) - sum).abs() / bound);
        let lse = problem.saved.lse[at];
        if lse == f32::NEG_INFINITY {
            if !(lse_log2 > 1e37 && lse_log2.is_finite()) {
                return Err(format!("lse_log2 {at} of a row that sees nothing is {lse_log2}"));
            }
            continue;
        }
        let exact = f64::from(lse) * std::f64::consts::LOG2_E;
        worst = worst.max((f64::from(lse_log2) - exact).abs() / (2.0 * step * exact.abs()));
    }
    match worst <= 2.0 {
        true => Ok(Found { worst, launches }),
        false => Err(format!("a statistic is off by {worst} times its bound")),
    }
}

fn run_cast(
    problem: &Problem,
    seed: u64,
    change: Change,
) -> Result<(Vec<Vec<f32>>, usize), String> {
    let Case { batch, q_len: rows, heads, head_dim, margin, element, second, .. } = problem.case;
    let mut world = World::new(seed, change);
    let sizes = [batch, rows, heads, head_dim];
    let a = world.rows("a", Scalar::F32, sizes, margin);
    let b = world.rows("b", Scalar::F32, sizes, 2 * margin);
    let out = world.rows("out", Scalar::Activation(element), sizes, 3 * margin);
    let [first, other] = summands(problem);
    a.fill(&mut world.memory, 0..rows, &first);
    if second {
        b.fill(&mut world.memory, 0..rows, &other);
    }
    let description = Cast {
        batch,
        rows,
        heads,
        head_dim,
        element,
        a: a.rows(0),
        b: second.then(|| b.rows(0)),
        out: out.rows(0),
        scale: scale(problem),
    };
    let chain = description.launches_within(problem.case.target, problem.case.limit);
    let chain = chain.map_err(|error| error.to_string())?;
    let launches = chain.len();
    world.run(chain, |_| None)?;
    world.audit(&[(&a, Stores::Never), (&b, Stores::Never), (&out, Stores::Exactly(1))])?;
    Ok((vec![out.read(&world.memory)], launches))
}

fn summands(problem: &Problem) -> [Vec<f32>; 2] {
    let mut random = Random(11);
    [0, 1].map(|_| random.tensor(problem.inputs.q.len(), |value| value))
}

/// Returns a factor of sums, which is 1 without a second summand.
fn scale(problem: &Problem) -> f32 {
    if problem.case.second { 0.3 } else { 1.0 }
}

/// Checks that the result is, bit for bit, a float32 sum, scaled and rounded once more.
pub fn check_cast(problem: &Problem, change: Change) -> Result<Found, String> {
    let (outputs, launches) = problem.twice(|seed| run_cast(problem, seed, change))?;
    let [a, b] = summands(problem);
    let element = problem.case.element;
    let sum = a.iter().zip(&b).map(|(a, b)| if problem.case.second { a + b } else { *a });
    let sum = sum.map(|sum| round(element, scale(problem) * sum));
    match sum.zip(&outputs[0]).position(|(sum, &got)| sum.to_bits() != got.to_bits()) {
        None => Ok(Found { worst: 0.0, launches }),
        Some(at) => Err(format!("element {at} of out is {}", outputs[0][at])),
    }
}

fn run_accumulate(
    problem: &Problem,
    seed: u64,
    change: Change,
) -> Result<(Vec<Vec<f32>>, usize), String> {
    let Case { batch, q_len: rows, heads, head_dim, margin, .. } = problem.case;
    let mut world = World::new(seed, change);
    let sizes = [batch, rows, heads, head_dim];
    let home = world.rows("home", Scalar::F32, sizes, margin);
    let arrived = world.rows("arrived", Scalar::F32, sizes, 2 * margin);
    let [first, other] = summands(problem);
    home.fill(&mut world.memory, 0..rows, &first);
    arrived.fill(&mut world.memory, 0..rows, &other);
    let description = Accumulate {
        batch,
        rows,
        heads,
        head_dim,
        home: home.rows(0),
        arrived: arrived.rows(0),
        scale: scale(problem),
    };
    let chain = description.launches_within(problem.case.target, problem.case.limit);
    let chain = chain.map_err(|error| error.to_string())?;
    let launches = chain.len();
    world.run(chain, |_| None)?;
    world.audit(&[(&home, Stores::Exactly(1)), (&arrived, Stores::Never)])?;
    Ok((vec![home.read(&world.memory)], launches))
}

/// Checks that the result is, bit for bit, a scaled float32 sum.
pub fn check_accumulate(problem: &Problem, change: Change) -> Result<Found, String> {
    let (outputs, launches) = problem.twice(|seed| run_accumulate(problem, seed, change))?;
    let [home, arrived] = summands(problem);
    let scale = scale(problem);
    let mut sums = home.iter().zip(&arrived).map(|(home, arrived)| home + arrived * scale);
    let wrong =
        outputs[0].iter().position(|got| sums.next().map(f32::to_bits) != Some(got.to_bits()));
    match wrong {
        None => Ok(Found { worst: 0.0, launches }),
        Some(at) => Err(format!("element {at} of home is {}", outputs[0][at])),
    }
}

fn run_add_gradient(
    problem: &Problem,
    seed: u64,
    change: Change,
) -> Result<(Vec<Vec<f32>>, usize), String> {
    let Case { batch, q_len: rows, heads, kv_heads, head_dim, margin, .. } = problem.case;
    let Case { element, finished, second, .. } = problem.case;
    let mut world = World::new(seed, change);
    let sizes = [batch, rows, kv_heads, head_dim];
    let home = world.rows("home", Scalar::F32, sizes, margin);
    let each = [batch, rows, heads, head_dim];
    let arrived = world.rows("arrived", Scalar::Activation(element), each, 2 * margin);
    let out = world.rows("out", Scalar::Activation(element), sizes, 3 * margin);
    let (sum, gradient) = grouped_summands(problem);
    if second {
        home.fill(&mut world.memory, 0..rows, &sum);
    }
    arrived.fill(&mut world.memory, 0..rows, &gradient);
    let description = AddGradient {
        batch,
        rows,
        heads: kv_heads,
        group: heads / kv_heads,
        head_dim,
        element,
        home: (second || !finished).then(|| home.rows(0)),
        arrived: arrived.rows(0),
        scale: scale(problem),
        out: finished.then(|| out.rows(0)),
        first: !second,
        last: finished,
    };
    let chain = description.launches_within(problem.case.target, problem.case.limit);
    let chain = chain.map_err(|error| error.to_string())?;
    let launches = chain.len();
    world.run(chain, |_| None)?;
    let [sums, results] = [!finished, finished].map(|written| Stores::Exactly(written.into()));
    world.audit(&[(&home, sums), (&arrived, Stores::Never), (&out, results)])?;
    Ok((vec![if finished { &out } else { &home }.read(&world.memory)], launches))
}

/// Returns the sum at home, and the rounded gradient of each head of its groups.
fn grouped_summands(problem: &Problem) -> (Vec<f32>, Vec<f32>) {
    let Case { element, heads, kv_heads, head_dim, .. } = problem.case;
    let [sum, gradient] = summands(problem);
    let home = sum.chunks_exact(heads * head_dim).flat_map(|row| &row[..kv_heads * head_dim]);
    let gradient = gradient.iter().map(|&value| round(element, value));
    (home.copied().collect(), gradient.collect())
}

/// Checks that the result is, bit for bit, a float32 sum, rounded once more if it is finished.
pub fn check_add_gradient(problem: &Problem, change: Change) -> Result<Found, String> {
    let (outputs, launches) = problem.twice(|seed| run_add_gradient(problem, seed, change))?;
    let Case { element, finished, second, .. } = problem.case;
    let Case { heads, kv_heads, head_dim, .. } = problem.case;
    let (home, gradient) = grouped_summands(problem);
    let (group, factor) = (heads / kv_heads, scale(problem));
    let sums = home.iter().enumerate().map(|(at, &home)| {
        let first = at / head_dim * group * head_dim + at % head_dim;
        let members = (0..group).map(|member| gradient[first + member * head_dim]);
        let sum = members.fold(0.0, |sum, member| sum + member) * factor;
        let sum = if second { home + sum } else { sum };
        if finished { round(element, sum) } else { sum }
    });
    match sums.zip(&outputs[0]).position(|(sum, &got)| sum.to_bits() != got.to_bits()) {
        None => Ok(Found { worst: 0.0, launches }),
        Some(at) => Err(format!("element {at} is {}", outputs[0][at])),
    }
}

fn run_pack_lse(
    problem: &Problem,
    seed: u64,
    change: Change,
) -> Result<(Vec<Vec<f32>>, usize), String> {
    let Case { batch, q_len, heads, margin, .. } = problem.case;
    let mut world = World::new(seed, change);
    let lse = world.rows("lse", Scalar::F32, [batch, q_len, heads, 1], 3 * margin / 2);
    let packed = world.statistics("packed_lse", [batch, q_len, heads], margin);
    lse.fill(&mut world.memory, 0..q_len, &problem.saved.lse);
    let description =
        PackLse { batch, q_len, heads, lse: lse.rows(0), packed: packed.statistics(0) };
    let chain = description.launches_within(problem.case.target, problem.case.limit);
    let chain = chain.map_err(|error| error.to_string())?;
    let launches = chain.len();
    world.run(chain, |_| None)?;
    world.audit(&[(&lse, Stores::Never), (&packed, Stores::Exactly(1))])?;
    Ok((vec![packed.read(&world.memory)], launches))
}

/// Checks that the numbers keep their bits.
pub fn check_pack_lse(problem: &Problem, change: Change) -> Result<Found, String> {
    let (outputs, launches) = problem.twice(|seed| run_pack_lse(problem, seed, change))?;
    let numbers = problem.saved.lse.iter().zip(&outputs[0]);
    match numbers.clone().position(|(lse, packed)| lse.to_bits() != packed.to_bits()) {
        None => Ok(Found { worst: 0.0, launches }),
        Some(at) => Err(format!("number {at} is {}", outputs[0][at])),
    }
}

#[test]
fn branches_and_loops_go_every_way() {
    let case = Case { q_len: 70, heads: 4, kv_heads: 2, head_dim: 16, ..CASE };
    let cases = [
        case,
        Case { second: false, kv_heads: 4, ..case },
        Case { finished: false, ..case },
        Case { steps: &[(0, 64), (64, 100)], ..case },
    ];
    let checks = [
        check_delta,
        check_cast,
        check_accumulate,
        check_add_gradient,
        check_pack_lse,
        combine_softmax::check,
        fold_result::check,
    ];
    Group::Rows.assert_reached(|| {
        for case in cases {
            let problem = Problem::new(case);
            for check in checks {
                check(&problem, Change::None).unwrap_or_else(|error| panic!("{error}\n{case:?}"));
            }
        }
    });
}
