//! Attributes of operations: the attributes that each operation may have, and their values.

use super::error::{Outcome, malformed, unsupported};
use super::program::Step;
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{Attribute, Operation};

/// Returns the attributes that an operation may carry. Any other attribute is an error, because it
/// may change the meaning.
fn known(opcode: Opcode) -> &'static [&'static str] {
    use Opcode::*;
    match opcode {
        AddF | SubF | MulF | DivF | Fma | Sqrt => &["rounding_mode", "flush_to_zero"],
        Exp2 | Rsqrt => &["flush_to_zero"],
        Exp | TanH | FToF => &["rounding_mode"],
        // The compiler puts a rounding on every float operation. On these operations it must be the
        // default.
        MaxF | MinF => &["propagate_nan", "flush_to_zero", "rounding_mode"],
        AddI | SubI | MulI | ShLI | TruncI | NegI => &["overflow"],
        ShRI | ExtI | MaxI | MinI | RemI => &["signedness"],
        DivI => &["signedness", "rounding"],
        IToF => &["signedness", "rounding_mode"],
        FToI => &["signedness", "rounding_mode", "saturating"],
        CmpF => &["comparison_predicate", "comparison_ordering"],
        CmpI => &["comparison_predicate", "signedness"],
        MmaF => &["fast_acc"],
        MmaI => &["signedness_lhs", "signedness_rhs"],
        Constant => &["value"],
        Permute => &["permutation"],
        Cat => &["dim"],
        Reduce => &["dim", "identities"],
        Scan => &["dim", "identities", "reverse"],
        Assert => &["message"],
        Assume => &["predicate"],
        For => &["unsigned_cmp"],
        Print => &["str", "operandSegmentSizes"],
        MakeTensorView => &["operandSegmentSizes"],
        LoadPtrTko | StorePtrTko => &[
            "memory_ordering_semantics",
            "memory_scope",
            "optimization_hints",
            "operandSegmentSizes",
        ],
        LoadViewTko | StoreViewTko => &[
            "memory_ordering_semantics",
            "memory_scope",
            "optimization_hints",
            "operandSegmentSizes",
            "inbounds",
        ],
        AtomicRMW | AtomicRedViewTko => {
            &["memory_ordering_semantics", "memory_scope", "mode", "operandSegmentSizes"]
        }
        AtomicCAS => &["memory_ordering_semantics", "memory_scope", "operandSegmentSizes"],
        Entry => &[
            "sym_name",
            "di_name",
            "function_type",
            "arg_attrs",
            "res_attrs",
            "optimization_hints",
        ],
        _ => &[],
    }
}

/// Refuses attributes that the interpreter's meaning of the operation does not cover.
pub(super) fn check(op: &Operation) -> Outcome<()> {
    for (index, (name, value)) in op.attributes.iter().enumerate() {
        if !known(op.opcode).contains(&name.as_str()) {
            return unsupported(format!("attribute {name} = {value:?}"));
        }
        if op.attributes[..index].iter().any(|(other, _)| other == name) {
            return malformed(format!("attribute {name} given twice"));
        }
        let limit = match name.as_str() {
            "memory_ordering_semantics" => 4,
            "memory_scope" => 2,
            _ => continue,
        };
        if !matches!(value, Attribute::Integer(0.., _)) || integer(value)? > limit {
            return unsupported(format!("attribute {name} = {value:?}"));
        }
    }
    Ok(())
}

fn integer(value: &Attribute) -> Outcome<i64> {
    match value {
        Attribute::Integer(value, _) => Ok(*value),
        Attribute::Bool(value) => Ok((*value).into()),
        other => malformed(format!("an integer attribute expected, got {other:?}")),
    }
}

/// Tile IR's number of rounding floats to nearest even.
pub(super) const NEAREST_EVEN: i64 = 0;
pub(super) const ZERO: i64 = 1;
pub(super) const NEGATIVE_INF: i64 = 2;
pub(super) const POSITIVE_INF: i64 = 3;
pub(super) const APPROX: i64 = 4;
pub(super) const FULL: i64 = 5;
pub(super) const NEAREST_INT_TO_ZERO: i64 = 6;

impl<'m> Step<'m> {
    pub fn find(&self, name: &str) -> Option<&'m Attribute> {
        self.op.attributes.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    pub fn attribute(&self, name: &str) -> Outcome<&'m Attribute> {
        self.find(name).map_or_else(|| malformed(format!("attribute {name} is missing")), Ok)
    }

    /// Returns a required integer attribute.
    pub fn int(&self, name: &str) -> Outcome<i64> {
        integer(self.attribute(name)?)
    }

    /// Returns an integer attribute, or its default.
    pub fn int_or(&self, name: &str, default: i64) -> Outcome<i64> {
        self.find(name).map_or(Ok(default), integer)
    }

    /// Whether an attribute says that integers are signed.
    pub fn signed(&self, name: &str) -> Outcome<bool> {
        match self.int(name)? {
            0 => Ok(false),
            1 => Ok(true),
            other => unsupported(format!("{name} {other}")),
        }
    }

    /// Whether a flag is present. A flag that is present and false is refused, because the
    /// bytecode's writer would set some of such flags.
    pub fn flag(&self, name: &str) -> Outcome<bool> {
        match self.find(name) {
            None => Ok(false),
            Some(Attribute::Bool(true) | Attribute::Integer(1, _)) => Ok(true),
            Some(other) => malformed(format!("flag {name} is {other:?}")),
        }
    }

    /// Returns a rounding mode, which must be one of the allowed modes.
    pub fn rounding(&self, name: &str, default: Option<i64>, allowed: &[i64]) -> Outcome<i64> {
        let mode = match default {
            Some(default) => self.int_or(name, default)?,
            None => self.int(name)?,
        };
        if allowed.contains(&mode) { Ok(mode) } else { unsupported(format!("{name} {mode}")) }
    }

    /// Returns the operands by group; `groups` is the number of groups of the operation.
    pub fn segments(&self, groups: usize) -> Outcome<Vec<&'m [cutile_ir::ir::Value]>> {
        let operands = &self.op.operands;
        let sizes = match self.find("operandSegmentSizes") {
            Some(Attribute::Array(sizes)) => {
                sizes.iter().map(integer).collect::<Outcome<Vec<_>>>()?
            }
            Some(other) => return malformed(format!("operandSegmentSizes {other:?}")),
            None => (0..groups).map(|group| (group < operands.len()).into()).collect(),
        };
        let fits = sizes.len() == groups && sizes.iter().all(|&size| size >= 0);
        if !fits || sizes.iter().sum::<i64>() != operands.len() as i64 {
            let count = operands.len();
            return malformed(format!("{count} operands in {groups} groups of sizes {sizes:?}"));
        }
        let mut rest = &operands[..];
        let mut cut = |size| {
            let (group, tail) = rest.split_at(size as usize);
            rest = tail;
            group
        };
        Ok(sizes.into_iter().map(&mut cut).collect())
    }
}
