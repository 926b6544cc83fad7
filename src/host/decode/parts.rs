//! The merge of results over parts of the keys: of ranks, of a prefix and a sequence's own keys.

use super::merge::{finished, largest, weight};

/// Merges results over disjoint parts of the keys, row by row, in the order of the parts:
///
/// ```text
/// lse = ln Σ_i e^lse_i;   out = Σ_i e^(lse_i − lse) out_i
/// ```
///
/// A row has `columns` floats: out, then lse. `parts` is `[parts, rows, columns]` and `merged` is
/// `[rows, columns]`. A part of lse −∞ adds nothing. A part of lse +∞ takes all weight, as a sink
/// of +∞ does. A row without keys has out 0 and lse −∞.
///
/// Each number is made by the same operations in the same order in every row, and Rust keeps the
/// result of each operation when it compiles a loop to vectors. So the bits of a row depend neither
/// on the number of rows nor on its place among them.
///
/// # Panics
/// If `columns` is 0.
pub fn merge_parts(parts: &[f32], merged: &mut [f32], columns: usize) {
    let (len, dim) = (merged.len().max(1), columns - 1);
    for (index, to) in merged.chunks_exact_mut(columns).enumerate() {
        let at = index * columns;
        let rows = parts.chunks_exact(len).map(|part| &part[at..at + columns]);
        let m = largest(rows.clone().map(|row| row[dim]));
        let mut sum = 0.0;
        to.fill(0.0);
        for row in rows {
            let weight = weight(row[dim], m);
            sum += weight;
            to.iter_mut().zip(&row[..dim]).for_each(|(to, x)| *to += weight * x);
        }
        let (factor, lse) = finished([m, sum]);
        to[..dim].iter_mut().for_each(|x| *x *= factor);
        to[dim] = lse;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: usize = 18;

    /// Parts with lse from −3 to 3, with some of −∞.
    fn parts(count: usize, rows: usize) -> Vec<f32> {
        let noise = |i: usize| (i as f32 * 12.9898).sin() * 3.0;
        let mut parts: Vec<f32> = (0..count * rows * COLUMNS).map(noise).collect();
        for row in parts.chunks_exact_mut(COLUMNS).step_by(5) {
            row.fill(0.0);
            row[COLUMNS - 1] = f32::NEG_INFINITY;
        }
        parts
    }

    fn merged(parts: &[f32], count: usize) -> Vec<f32> {
        let mut merged = vec![f32::NAN; parts.len() / count];
        merge_parts(parts, &mut merged, COLUMNS);
        merged
    }

    #[test]
    fn rows_are_those_of_the_formula() {
        let (count, rows) = (4, 7);
        let parts = parts(count, rows);
        for (index, row) in merged(&parts, count).chunks_exact(COLUMNS).enumerate() {
            let of_row = |part: usize| &parts[(part * rows + index) * COLUMNS..][..COLUMNS];
            let sum_of = |term: &dyn Fn(&[f32]) -> f64| -> f64 {
                (0..count).map(|part| term(of_row(part))).sum()
            };
            let weight = |row: &[f32]| f64::from(row[COLUMNS - 1]).exp();
            let total = sum_of(&weight);
            assert!((f64::from(row[COLUMNS - 1]) - total.ln()).abs() < 1e-6);
            for d in 0..COLUMNS - 1 {
                let exact = sum_of(&|row| weight(row) * f64::from(row[d])) / total;
                assert!((f64::from(row[d]) - exact).abs() < 2e-6, "{} not {exact}", row[d]);
            }
        }
    }

    /// The bits of a row alone are its bits among any number of rows, in any place.
    #[test]
    fn the_bits_of_a_row_are_its_own() {
        for (count, rows) in [(1, 9), (2, 33), (8, 17)] {
            let parts = parts(count, rows);
            let whole = merged(&parts, count);
            for size in 1..=rows {
                for first in [0, 1, rows - size].into_iter().filter(|first| first + size <= rows) {
                    let range = first * COLUMNS..(first + size) * COLUMNS;
                    let some: Vec<f32> = parts
                        .chunks_exact(rows * COLUMNS)
                        .flat_map(|part| part[range.clone()].iter().copied())
                        .collect();
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&merged(&some, count)), bits(&whole[range]));
                }
            }
        }
    }

    #[test]
    fn infinite_and_missing_parts_are_defined() {
        const NONE: f32 = f32::NEG_INFINITY;
        const ALL: f32 = f32::INFINITY;
        let merged = |lses: &[f32]| {
            let parts: Vec<f32> = lses.iter().flat_map(|lse| [2.0, *lse]).collect();
            let mut merged = [f32::NAN; 2];
            merge_parts(&parts, &mut merged, 2);
            merged
        };
        assert_eq!(merged(&[]), [0.0, NONE]);
        assert_eq!(merged(&[NONE, NONE]), [0.0, NONE]);
        assert_eq!(merged(&[NONE, 0.7]), [2.0, 0.7]);
        assert_eq!(merged(&[1e30, ALL, NONE]), [2.0, ALL]);
        for lses in [[f32::NAN, NONE], [0.5, f32::NAN], [ALL, f32::NAN]] {
            assert!(merged(&lses).iter().all(|x| x.is_nan()), "{lses:?}");
        }
        merge_parts(&[], &mut [], 2);
    }
}
