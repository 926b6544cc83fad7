//! Matrix products.

use super::error::{Outcome, malformed, unsupported};
use super::machine::Machine;
use super::program::Step;
use super::tile::{Data, Element, Tile, unsigned, wrap};
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::ScalarType;
use std::ops::{Add, Mul};

/// Sizes of a batch of products `[M, K] x [K, N]`.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    m: usize,
    k: usize,
    n: usize,
}

impl Sizes {
    fn of(lhs: &[usize], rhs: &[usize], acc: &[usize]) -> Outcome<Self> {
        let split = |shape: &[usize]| match *shape {
            [rows, columns] => Some((1, rows, columns)),
            [batch, rows, columns] => Some((batch, rows, columns)),
            _ => None,
        };
        if let (Some((batch, m, k)), Some((b, k2, n)), Some(c)) =
            (split(lhs), split(rhs), split(acc))
            && lhs.len() == rhs.len()
            && lhs.len() == acc.len()
            && (b, k2, c) == (batch, k, (batch, m, n))
        {
            return Ok(Self { batch, m, k, n });
        }
        malformed(format!("{lhs:?} times {rhs:?} plus {acc:?}"))
    }
}

/// Adds `lhs x rhs` to `out`. It sums each element over K in ascending order, with one rounding for
/// each product and each sum. It takes four K at a time, which touches `out` less often.
fn accumulate<T: Copy + Add<Output = T> + Mul<Output = T>>(
    Sizes { batch, m, k, n }: Sizes,
    lhs: &[T],
    rhs: &[T],
    out: &mut [T],
) {
    for row in 0..batch * m {
        let factors = &lhs[row * k..][..k];
        let matrix = &rhs[row / m * k * n..][..k * n];
        let out = &mut out[row * n..][..n];
        let (fours, rest) = factors.as_chunks::<4>();
        let mut rows = matrix.chunks_exact(n);
        for &[f0, f1, f2, f3] in fours {
            let mut next = || &rows.next().expect("K rows")[..n];
            let (r0, r1, r2, r3) = (next(), next(), next(), next());
            for j in 0..n {
                out[j] = out[j] + f0 * r0[j] + f1 * r1[j] + f2 * r2[j] + f3 * r3[j];
            }
        }
        for (&factor, row) in rest.iter().zip(rows) {
            out.iter_mut().zip(row).for_each(|(out, &x)| *out = *out + factor * x);
        }
    }
}

impl<'a> Machine<'a> {
    pub fn multiply(&mut self, step: &Step<'a>) -> Outcome<Tile> {
        let [lhs, rhs, acc] = self.tiles::<3>(step)?;
        let sizes = Sizes::of(&lhs.shape, &rhs.shape, &acc.shape)?;
        if lhs.element != rhs.element {
            return malformed(format!("{:?} times {:?}", lhs.element, rhs.element));
        }
        let data = match step.op.opcode {
            Opcode::MmaF => floats(step, sizes, &lhs, &rhs, &acc)?,
            Opcode::MmaI => integers(step, sizes, &lhs, &rhs, &acc)?,
            other => return unsupported(other.name()),
        };
        Ok(Tile::new(acc.element, acc.shape.clone(), data))
    }
}

fn floats(step: &Step, sizes: Sizes, lhs: &Tile, rhs: &Tile, acc: &Tile) -> Outcome<Data> {
    use ScalarType::{BF16, F16, F32, F64};
    if step.find("fast_acc").is_some() {
        return unsupported("fast_acc");
    }
    let pair = (lhs.element, acc.element);
    let allowed = [(F16, F16), (F16, F32), (BF16, F32), (F32, F32), (F64, F64)];
    if !allowed.iter().any(|&(a, b)| pair == (Element::Scalar(a), Element::Scalar(b))) {
        return unsupported(format!("mmaf of {:?} into {:?}", lhs.element, acc.element));
    }
    match (&*lhs.data, &*rhs.data, &*acc.data) {
        (Data::F32(lhs), Data::F32(rhs), Data::F32(start)) => {
            let mut out = start.clone();
            accumulate(sizes, lhs, rhs, &mut out);
            acc.element.round(&mut out);
            Ok(Data::F32(out))
        }
        (Data::F64(lhs), Data::F64(rhs), Data::F64(start)) => {
            let mut out = start.clone();
            accumulate(sizes, lhs, rhs, &mut out);
            Ok(Data::F64(out))
        }
        _ => malformed("floats expected"),
    }
}

fn integers(step: &Step, sizes: Sizes, lhs: &Tile, rhs: &Tile, acc: &Tile) -> Outcome<Data> {
    if lhs.bits()? != 8 || acc.bits()? != 32 {
        return unsupported(format!("mmai of {:?} into {:?}", lhs.element, acc.element));
    }
    let operand = |tile: &Tile, name| -> Outcome<Vec<i64>> {
        let signed = step.signed(name)?;
        let one = |&x: &i64| if signed { x } else { unsigned(x, 8) as i64 };
        Ok(tile.ints()?.iter().map(one).collect())
    };
    let (lhs, rhs) = (operand(lhs, "signedness_lhs")?, operand(rhs, "signedness_rhs")?);
    let mut out = acc.ints()?.to_vec();
    accumulate(sizes, &lhs, &rhs, &mut out);
    out.iter_mut().for_each(|x| *x = wrap((*x).into(), 32));
    Ok(Data::Int(out))
}
