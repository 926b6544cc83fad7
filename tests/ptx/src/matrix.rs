//! `ldmatrix` and `stmatrix`: a warp moves matrices of 8 × 8 elements of 16 bits.
//!
//! Lane 8 m + r has the address of row r of matrix m. Lane l holds the elements 2 (l mod 4) and the
//! next one of row l / 4 of each matrix, or of column l / 4 with `trans`.

use crate::body::Builder;
use crate::collective::LANES;
use crate::compute::Width;
use crate::memory::Space;
use crate::program::{Access, Op, Source};
use crate::types::Mnemonic;

/// Bytes of a row.
pub(crate) const ROW: usize = 16;

pub(crate) struct Matrix {
    pub access: Access,
    pub transposed: bool,
    /// The registers that a load writes, one for each matrix.
    pub to: Vec<Option<u32>>,
    /// The registers that a store reads, one for each matrix.
    pub from: Vec<Source>,
}

impl Matrix {
    pub fn count(&self) -> usize {
        self.to.len().max(self.from.len())
    }

    /// Returns row and column of an element of a lane; `half` is 0 or 1.
    pub fn place(&self, lane: usize, half: usize) -> (usize, usize) {
        let (row, column) = (lane / 4, lane % 4 * 2 + half);
        if self.transposed { (column, row) } else { (row, column) }
    }

    /// Returns what the lanes hold of a matrix.
    pub fn spread(&self, rows: &[[u8; ROW]; 8]) -> [u64; LANES] {
        std::array::from_fn(|lane| {
            let element = |half| {
                let (row, column) = self.place(lane, half);
                u64::from(rows[row][2 * column]) | u64::from(rows[row][2 * column + 1]) << 8
            };
            element(0) | element(1) << 16
        })
    }

    /// Returns the rows of the matrix that the lanes hold.
    pub fn gather(&self, lanes: &[u64; LANES]) -> [[u8; ROW]; 8] {
        let mut rows = [[0; ROW]; 8];
        for (lane, half) in (0..LANES).flat_map(|lane| [(lane, 0), (lane, 1)]) {
            let (row, column) = self.place(lane, half);
            let bytes = (lanes[lane] >> (16 * half)).to_le_bytes();
            rows[row][2 * column..][..2].copy_from_slice(&bytes[..2]);
        }
        rows
    }
}

impl Builder<'_, '_> {
    pub fn matrix(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<(), String> {
        for part in ["sync", "aligned"] {
            mnemonic.take(part);
        }
        let shapes = [("m8n8", ())];
        mnemonic.require("shape", &shapes)?;
        let count = mnemonic.require("count", &[("x1", 1), ("x2", 2), ("x4", 4)])?;
        let transposed = mnemonic.take("trans");
        let space = mnemonic.choose(&Space::WINDOWS).unwrap_or(Space::Generic);
        if mnemonic.ty()?.bits != 16 {
            return Err("the elements of a matrix have 16 bits".into());
        }
        let (mut to, mut from) = (vec![], vec![]);
        let loads = mnemonic.name == "ldmatrix";
        if loads {
            to = self.vector(|builder| builder.destination(32))?;
            self.cursor.expect(",")?;
        }
        let access = self.address(space, ROW)?;
        if !loads {
            self.cursor.expect(",")?;
            from = self.vector(|builder| builder.source(Width::Exactly(32)))?;
        }
        let matrix = Matrix { access, transposed, to, from };
        if matrix.count() != count {
            return Err(format!("{count} matrices need as many registers"));
        }
        self.push(Op::Matrix(Box::new(matrix)));
        Ok(())
    }
}
