//! Instructions that compute one value from registers alone.

use crate::types::{Mnemonic, Type};
use crate::{convert, float, integer};

/// Returns the result's bits, or nothing where PTX leaves the result open.
pub(crate) type Function = Box<dyn Fn(&[u64; 4]) -> Option<u64> + Send + Sync>;

/// The width of a register that an operand takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    Exactly(u32),
    /// A wider register holds the value in its low bits.
    AtLeast(u32),
}

/// A function and its operands' widths.
pub(crate) struct Compute {
    pub to: Width,
    pub from: Vec<Width>,
    pub function: Function,
    /// The number of operands, from the first on, whose bits the function only moves.
    pub moved: usize,
}

impl Compute {
    /// Makes a computation whose operands all have the result's width.
    pub fn uniform(
        ty: Type,
        operands: usize,
        function: impl Fn(&[u64; 4]) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        Self::new(ty.width(), &vec![ty.width(); operands], function)
    }

    pub fn new(
        to: u32,
        from: &[u32],
        function: impl Fn(&[u64; 4]) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        let from = from.iter().map(|&bits| Width::Exactly(bits)).collect();
        Self { to: Width::Exactly(to), from, function: Box::new(function), moved: 0 }
    }

    /// Tells that the function only moves the bits of its first operands. They may lack bits, which
    /// the result then lacks too.
    pub fn moving(self, moved: usize) -> Self {
        Self { moved, ..self }
    }
}

/// Returns the computation of an instruction, or nothing if it is not of this kind.
pub(crate) fn compute(mnemonic: &mut Mnemonic<'_>) -> Result<Option<Compute>, String> {
    for decode in [convert::decode, integer::bits, integer::decode, float::decode] {
        if let Some(found) = decode(mnemonic)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Returns the function of an instruction of two operands, such as `add.s32`.
pub(crate) fn function(name: &str) -> Result<Function, String> {
    let found = compute(&mut Mnemonic::new(name, 2))?;
    Ok(found.ok_or_else(|| format!("'{name}' is not supported"))?.function)
}
