//! A table of what the compiler made of every kernel, to keep and to compare against.
//!
//! The compiler is pinned, so a table changes only where a kernel changed: most columns are
//! compared exactly.

use std::fmt;
use std::str::FromStr;

use super::{Error, Quality};

/// What a change of a column means.
#[derive(Debug, Clone, Copy)]
enum Rule {
    /// Worse where it grows by more than this.
    AtMost(u32),
    /// Worse where it shrinks.
    AtLeast,
    /// Neither way is worse in itself.
    Either,
}

/// Up to so many more registers cost nothing: they are granted to a warp eight at a time.
const REGISTER_SLACK: u32 = 8;

type Read = fn(&Quality) -> u32;

/// The columns behind name and target. `loop_…` and those behind it are sums over the loops.
const COLUMNS: [(&str, Rule, Read); 18] = [
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

/// A line of the table; prints and parses with tabs between its columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Name of the image.
    pub name: String,
    /// Its architecture.
    pub target: String,
    values: [u32; COLUMNS.len()],
}

impl Quality {
    /// The line of the table for this kernel.
    pub fn to_row(&self) -> Row {
        let values = COLUMNS.map(|(_, _, read)| read(self));
        Row { name: self.name.clone(), target: self.target.clone(), values }
    }
}

impl Row {
    /// The names of the columns, as a line of the table.
    pub fn header() -> String {
        let names = ["name", "target"].into_iter().chain(COLUMNS.map(|(name, ..)| name));
        names.collect::<Vec<_>>().join("\t")
    }

    /// The value in the column of that name, if there is one.
    pub fn value(&self, column: &str) -> Option<u32> {
        let at = COLUMNS.iter().position(|&(name, ..)| name == column);
        at.map(|at| self.values[at])
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\t{}", self.name, self.target)?;
        self.values.iter().try_for_each(|value| write!(f, "\t{value}"))
    }
}

impl FromStr for Row {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self, Error> {
        let wrong = || Error::Row { expected: Self::header(), came: line.into() };
        let mut fields = line.split('\t');
        let mut text = || fields.next().filter(|field| !field.is_empty()).map(str::to_owned);
        let (name, target) = text().zip(text()).ok_or_else(wrong)?;
        let values: Vec<u32> =
            fields.map(str::parse).collect::<Result<_, _>>().map_err(|_| wrong())?;
        let values = values.try_into().map_err(|_| wrong())?;
        Ok(Self { name, target, values })
    }
}

/// What is worse now than in the baseline: one message each, with kernel, column, what was
/// expected and what came. A kernel that is no longer there is worse too.
pub fn regressions(baseline: &[Row], now: &[Row]) -> Vec<String> {
    compare(baseline, now, |rule, before, after| match rule {
        Rule::AtMost(slack) => after > before.saturating_add(slack),
        Rule::AtLeast => after < before,
        Rule::Either => false,
    })
    .chain(missing(baseline, now).map(|row| format!("{row}: expected a row, but there is none")))
    .collect()
}

/// What differs from the baseline and is not worse: reasons to write the baseline anew.
pub fn changes(baseline: &[Row], now: &[Row]) -> Vec<String> {
    compare(baseline, now, |rule, before, after| match rule {
        Rule::AtMost(slack) => after != before && after <= before.saturating_add(slack),
        Rule::AtLeast => after > before,
        Rule::Either => after != before,
    })
    .chain(missing(now, baseline).map(|row| format!("{row}: not in the baseline")))
    .collect()
}

/// The columns of rows in both tables for which `tell(rule, before, after)` holds.
fn compare(
    baseline: &[Row],
    now: &[Row],
    tell: impl Fn(Rule, u32, u32) -> bool,
) -> impl Iterator<Item = String> {
    let pairs = baseline
        .iter()
        .flat_map(|old| now.iter().filter(|new| same(old, new)).map(move |new| (old, new)));
    pairs.flat_map(move |(old, new)| {
        let mut messages = Vec::new();
        for (i, &(column, rule, _)) in COLUMNS.iter().enumerate() {
            let (before, after) = (old.values[i], new.values[i]);
            if tell(rule, before, after) {
                let bound = match rule {
                    Rule::AtMost(slack) => format!("at most {}", before.saturating_add(slack)),
                    Rule::AtLeast => format!("at least {before}"),
                    Rule::Either => before.to_string(),
                };
                let (name, target) = (&old.name, &old.target);
                messages.push(format!("{name} {target}: {column}: expected {bound}, came {after}"));
            }
        }
        messages
    })
}

/// Kernel and target of the rows of `one` that `other` lacks.
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
        line.parse().unwrap()
    }

    fn with(column: &str, value: u32) -> Row {
        let mut row = row("forward");
        let at = COLUMNS.iter().position(|&(name, ..)| name == column).unwrap();
        row.values[at] = value;
        row
    }

    #[test]
    fn a_row_is_read_as_it_is_written() {
        let row = row("forward");
        assert_eq!(row.to_string().parse(), Ok(row.clone()));
        assert_eq!(Row::header().split('\t').count(), row.to_string().split('\t').count());
        let read = ["regs", "tma", "pipelined", "none"].map(|column| row.value(column));
        assert_eq!(read, [Some(168), Some(8), Some(2), None]);
    }

    #[test]
    fn other_lines_are_no_rows() {
        let line = row("forward").to_string();
        let short = line.rsplit_once('\t').unwrap().0.to_owned();
        let lines =
            [String::new(), Row::header(), format!("{line}\t1"), short, format!("\t{line}")];
        for line in lines {
            assert!(matches!(line.parse::<Row>(), Err(Error::Row { .. })), "{line}");
        }
    }

    #[test]
    fn equal_tables_have_neither_regressions_nor_changes() {
        let table = [row("forward"), row("backward")];
        assert_eq!(regressions(&table, &table), [""; 0]);
        assert_eq!(changes(&table, &table), [""; 0]);
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
            assert_eq!(regressions(&before, &now), [expected]);
            assert_eq!(changes(&before, &now), [""; 0]);
            // The other way round it is an improvement.
            assert_eq!(regressions(&now, &before), [""; 0]);
            assert_eq!(changes(&now, &before).len(), 1, "{column}");
        }
    }

    #[test]
    fn a_few_registers_more_and_neutral_columns_are_changes_only() {
        for (column, value) in [("regs", 176), ("smem", 1), ("ex2", 70), ("mask", 0), ("pv_ex2", 0)]
        {
            let (before, now) = ([row("forward")], [with(column, value)]);
            assert_eq!(regressions(&before, &now), [""; 0], "{column}");
            assert_eq!(changes(&before, &now).len(), 1, "{column}");
        }
    }

    #[test]
    fn rows_are_matched_by_name_and_target_and_must_all_be_there() {
        let mut other = row("forward");
        other.target = "sm_100a".into();
        let (before, now) = ([row("forward")], [other]);
        assert_eq!(
            regressions(&before, &now),
            ["forward sm_90a: expected a row, but there is none"]
        );
        assert_eq!(changes(&before, &now), ["forward sm_100a: not in the baseline"]);
    }
}
