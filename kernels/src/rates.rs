//! Predicted rates of the kernels on H100 and H200, as `make kernel-quality WRITE=1` wrote them.

/// A table with a line for each case: its name, then TFLOP/s. The second column's name has the
/// version of the model.
pub const TABLE: &str = include_str!("../rates.tsv");

/// Returns the predicted TFLOP/s of a case of the table. A causal problem counts as half.
pub fn predicted(case: &str) -> Option<f64> {
    let mut lines = TABLE.lines().skip(1).filter_map(|line| line.split_once('\t'));
    lines.find(|(name, _)| *name == case).and_then(|(_, rate)| rate.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_a_rate() {
        let names: Vec<_> = TABLE.lines().skip(1).map(|l| l.split('\t').next().unwrap()).collect();
        assert!(names.contains(&"forward_d128_causal_8k"), "{names:?}");
        assert!(names.iter().all(|name| predicted(name).is_some_and(|rate| rate > 1.0)));
        assert_eq!(predicted("forward"), None);
    }
}
