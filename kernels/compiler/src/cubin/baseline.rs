//! Tables of what the compiler made of every kernel. They are kept, and later images are compared
//! against them.
//!
//! The compiler is pinned, so a table changes only where a kernel changed, and most columns are
//! compared exactly.

use std::fmt;

use super::{Error, Quality};

/// The meaning of a change of a column.
#[derive(Debug, Clone, Copy)]
pub enum Rule {
    /// A value that grows by more than this is worse.
    AtMost(u32),
    /// A value that shrinks is worse.
    AtLeast,
    /// Neither direction is worse in itself.
    Either,
}

impl Rule {
    /// Returns the largest value that is not worse than `before`; `None` where no larger value is
    /// worse.
    fn most(self, before: u32) -> Option<u32> {
        match self {
            Self::AtMost(slack) => Some(before.saturating_add(slack)),
            Self::AtLeast | Self::Either => None,
        }
    }

    fn is_worse(self, before: u32, after: u32) -> bool {
        let less = matches!(self, Self::AtLeast) && after < before;
        less || self.most(before).is_some_and(|most| after > most)
    }
}

/// A column: its name, what a change means, and the function that reads its value.
pub type Column<T> = (&'static str, Rule, fn(&T) -> u32);

/// Up to this many more registers cost nothing: a warp gets registers eight at a time.
const REGISTER_SLACK: u32 = 8;

/// The columns of an image. `loop_spills` and the columns behind it are sums over the loops.
pub const QUALITY: [Column<Quality>; 18] = [
    ("regs", Rule::AtMost(REGISTER_SLACK), |q| q.registers),
    ("smem", Rule::Either, |q| u32::try_from(q.shared).unwrap_or(u32::MAX)),
    ("stack", Rule::AtMost(0), |q| q.stack),
    ("spill_ld", Rule::AtMost(0), |q| q.total.spill_loads),
    ("spill_st", Rule::AtMost(0), |q| q.total.spill_stores),
    ("loop_spills", Rule::AtMost(0), |q| q.in_loops(|c| c.spill_loads + c.spill_stores)),
    ("mma", Rule::AtLeast, |q| q.in_loops(|c| c.matrix)),
    ("tma", Rule::AtLeast, |q| q.in_loops(|c| c.tma_loads)),
    ("ldgsts", Rule::AtLeast, |q| q.in_loops(|c| c.async_copies)),
    ("ldg", Rule::AtMost(0), |q| q.in_loops(|c| c.global_loads)),
    ("ex2", Rule::Either, |q| q.in_loops(|c| c.exponentials)),
    ("arith", Rule::Either, |q| q.in_loops(|c| c.arithmetic)),
    ("mask", Rule::Either, |q| q.in_loops(|c| c.masking)),
    ("bar", Rule::Either, |q| q.in_loops(|c| c.barriers)),
    ("wait", Rule::AtMost(0), |q| q.in_loops(|c| c.waits)),
    ("pipelined", Rule::AtLeast, |q| pipelined(q, true)),
    ("serial", Rule::AtMost(0), |q| pipelined(q, false)),
    ("pv_ex2", Rule::Either, |q| {
        q.attention_loops().map(|l| l.order.exponentials_between_pv()).sum()
    }),
];

fn pipelined(quality: &Quality, wanted: bool) -> u32 {
    quality.attention_loops().filter(|l| l.order.qk_before_pv() == wanted).count() as u32
}

/// A line of a table, printed and parsed with tabs between its columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Name of the image, or of a part of it.
    pub name: String,
    /// Its architecture.
    pub target: String,
    values: Vec<u32>,
}

impl Row {
    /// Returns the line of what was found.
    pub fn new<T>(columns: &[Column<T>], (name, target): (&str, &str), found: &T) -> Self {
        let values = columns.iter().map(|(_, _, read)| read(found)).collect();
        Self { name: name.into(), target: target.into(), values }
    }

    /// Returns the names of the columns, as a line of the table.
    pub fn header<T>(columns: &[Column<T>]) -> String {
        let names = ["name", "target"].into_iter().chain(columns.iter().map(|(name, ..)| *name));
        names.collect::<Vec<_>>().join("\t")
    }

    /// Returns the row that a line holds.
    ///
    /// # Errors
    /// If the line has other columns.
    pub fn parse<T>(columns: &[Column<T>], line: &str) -> Result<Self, Error> {
        let wrong = || Error::Row { expected: Self::header(columns), came: line.into() };
        let mut fields = line.split('\t');
        let mut text = || fields.next().filter(|field| !field.is_empty()).map(str::to_owned);
        let (name, target) = text().zip(text()).ok_or_else(wrong)?;
        let values: Result<Vec<u32>, _> = fields.map(str::parse).collect();
        let values = values.ok().filter(|values| values.len() == columns.len());
        Ok(Self { name, target, values: values.ok_or_else(wrong)? })
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\t{}", self.name, self.target)?;
        self.values.iter().try_for_each(|value| write!(f, "\t{value}"))
    }
}

/// Returns a message for everything that is worse now than in the baseline, with kernel, column,
/// expected value and value that came. A missing kernel is worse too.
pub fn regressions<T>(columns: &[Column<T>], baseline: &[Row], now: &[Row]) -> Vec<String> {
    compare(columns, baseline, now, Rule::is_worse)
        .chain(
            missing(baseline, now).map(|row| format!("{row}: expected a row, but there is none")),
        )
        .collect()
}

/// Returns a message for everything that differs from the baseline and is not worse: reasons to
/// write the baseline anew.
pub fn changes<T>(columns: &[Column<T>], baseline: &[Row], now: &[Row]) -> Vec<String> {
    compare(columns, baseline, now, |rule, before, after| {
        after != before && !rule.is_worse(before, after)
    })
    .chain(missing(now, baseline).map(|row| format!("{row}: not in the baseline")))
    .collect()
}

/// Returns a message for each column of rows in both tables for which `tell(rule, before, after)`
/// holds.
fn compare<T>(
    columns: &[Column<T>],
    baseline: &[Row],
    now: &[Row],
    tell: impl Fn(Rule, u32, u32) -> bool,
) -> impl Iterator<Item = String> {
    let pairs = baseline
        .iter()
        .flat_map(|old| now.iter().filter(|new| same(old, new)).map(move |new| (old, new)));
    pairs.flat_map(move |(old, new)| {
        let mut messages = Vec::new();
        for (i, &(column, rule, _)) in columns.iter().enumerate() {
            let (before, after) = (old.values[i], new.values[i]);
            if tell(rule, before, after) {
                let bound = match (rule, rule.most(before)) {
                    (_, Some(most)) => format!("at most {most}"),
                    (Rule::AtLeast, None) => format!("at least {before}"),
                    (_, None) => before.to_string(),
                };
                let (name, target) = (&old.name, &old.target);
                messages.push(format!("{name} {target}: {column}: expected {bound}, came {after}"));
            }
        }
        messages
    })
}

/// Returns kernel and target of the rows of `one` that `other` lacks.
fn missing(one: &[Row], other: &[Row]) -> impl Iterator<Item = String> {
    let lacks = |row: &&Row| !other.iter().any(|candidate| same(row, candidate));
    one.iter().filter(lacks).map(|row| format!("{} {}", row.name, row.target))
}

fn same(a: &Row, b: &Row) -> bool {
    a.name == b.name && a.target == b.target
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str) -> Row {
        let line = format!(
            "{name}\tsm_90a\t168\t231104\t0\t0\t0\t0\t24\t8\t0\t0\t68\t348\t66\t2\t6\t2\t0\t23"
        );
        Row::parse(&QUALITY, &line).unwrap()
    }

    fn with(column: &str, value: u32) -> Row {
        let mut row = row("forward");
        let at = QUALITY.iter().position(|&(name, ..)| name == column).unwrap();
        row.values[at] = value;
        row
    }

    #[test]
    fn a_row_is_read_as_it_is_written() {
        let row = row("forward");
        assert_eq!(Row::parse(&QUALITY, &row.to_string()), Ok(row.clone()));
        let count = |line: String| line.split('\t').count();
        assert_eq!(count(Row::header(&QUALITY)), count(row.to_string()));
    }

    #[test]
    fn other_lines_are_no_rows() {
        let line = row("forward").to_string();
        let short = line.rsplit_once('\t').unwrap().0.to_owned();
        let lines = [
            String::new(),
            Row::header(&QUALITY),
            format!("{line}\t1"),
            short,
            format!("\t{line}"),
        ];
        for line in lines {
            assert!(matches!(Row::parse(&QUALITY, &line), Err(Error::Row { .. })), "{line}");
        }
    }

    #[test]
    fn equal_tables_have_neither_regressions_nor_changes() {
        let table = [row("forward"), row("backward")];
        assert_eq!(regressions(&QUALITY, &table, &table), [""; 0]);
        assert_eq!(changes(&QUALITY, &table, &table), [""; 0]);
    }

    #[test]
    fn a_change_for_the_worse_names_kernel_column_and_both_values() {
        let cases = [
            ("regs", 177, "at most 176"),
            ("stack", 8, "at most 0"),
            ("spill_ld", 1, "at most 0"),
            ("spill_st", 1, "at most 0"),
            ("loop_spills", 1, "at most 0"),
            ("mma", 23, "at least 24"),
            ("tma", 0, "at least 8"),
            ("ldg", 1, "at most 0"),
            ("pipelined", 1, "at least 2"),
            ("serial", 1, "at most 0"),
        ];
        for (column, value, bound) in cases {
            let (before, now) = ([row("forward")], [with(column, value)]);
            let expected = format!("forward sm_90a: {column}: expected {bound}, came {value}");
            assert_eq!(regressions(&QUALITY, &before, &now), [expected]);
            assert_eq!(changes(&QUALITY, &before, &now), [""; 0]);
            // The opposite change is an improvement.
            assert_eq!(regressions(&QUALITY, &now, &before), [""; 0]);
            assert_eq!(changes(&QUALITY, &now, &before).len(), 1, "{column}");
        }
    }

    #[test]
    fn a_few_registers_more_and_neutral_columns_are_changes_only() {
        for (column, value) in [("regs", 176), ("smem", 1), ("ex2", 70), ("mask", 0), ("pv_ex2", 0)]
        {
            let (before, now) = ([row("forward")], [with(column, value)]);
            assert_eq!(regressions(&QUALITY, &before, &now), [""; 0], "{column}");
            assert_eq!(changes(&QUALITY, &before, &now).len(), 1, "{column}");
        }
    }

    #[test]
    fn rows_are_matched_by_name_and_target_and_must_all_be_there() {
        let mut other = row("forward");
        other.target = "sm_100a".into();
        let (before, now) = ([row("forward")], [other]);
        assert_eq!(
            regressions(&QUALITY, &before, &now),
            ["forward sm_90a: expected a row, but there is none"]
        );
        assert_eq!(changes(&QUALITY, &before, &now), ["forward sm_100a: not in the baseline"]);
    }
}
