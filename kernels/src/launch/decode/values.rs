//! The values of the arguments of decode's launches, by their meaning.

use super::{Decode, Split};
use crate::error::LaunchError;
use crate::instances::Instance;
use crate::launch::array::{self, Array};
use crate::place::Statistics;
use crate::record::{Argument, Meaning, Operand, Size, Value};
use crate::target::Target;
use crate::variant::Variant;

impl Decode {
    /// Returns the arrays of a launch, those in the workspace among them.
    pub(super) fn arrays(&self, Instance { kernel, target, .. }: Instance) -> Vec<Array> {
        let statistics = self.slots(target) * self.tile_rows(target);
        let [weights, tiles] = self.weights();
        let workspace = [
            (Operand::TileMax, 4 * tiles),
            (Operand::TileSum, 4 * tiles),
            (Operand::Weights, weights * self.element.bytes()),
            (Operand::PieceMax, 4 * statistics),
            (Operand::PieceSum, 4 * statistics),
            (Operand::PieceAcc, 4 * statistics * self.value_dim),
        ];
        let mut at = self.workspace;
        let workspace = workspace.map(|(operand, bytes)| {
            let address = at;
            at += bytes as u64;
            (operand, address)
        });
        let all = Decode::ARRAYS.into_iter().zip(self.arrays).chain(workspace);
        let own = all.filter(|(operand, _)| kernel.find(Meaning::Address(*operand)).is_some());
        let size = |size| self.size(size, target);
        let array = |(operand, address)| {
            let at = Statistics { address, ..Statistics::default() };
            let of = (kernel, Variant::PLAIN);
            Array::new(of, operand, self.element, size, at).contiguous(size)
        };
        own.map(array).collect()
    }

    fn size(&self, size: Size, target: Target) -> usize {
        match size {
            Size::Units => self.units,
            Size::QLen => self.rows,
            Size::KvHeads => self.kv_heads,
            Size::HeadDim => self.head_dim,
            Size::ValueDim => self.value_dim,
            Size::Pages => self.pages,
            Size::PageRows => self.page_rows,
            Size::Sources => self.sources,
            Size::SourcePages => self.source_pages,
            Size::Capacity => self.capacity(),
            Size::Tiles => self.capacity() / self.page_tile(),
            Size::PaddedRows => self.padded_rows(),
            Size::Slots => self.slots(target),
            Size::TileRows => self.tile_rows(target),
            other => unreachable!("decode has no {other:?}"),
        }
    }

    fn page_shift(&self) -> u32 {
        if self.source_pages == 1 { 31 } else { self.page_rows.div_ceil(self.page_tile()).ilog2() }
    }

    /// Returns the value of an argument, with the keys cut by `cut`.
    pub(super) fn value(
        &self,
        argument: &'static Argument,
        arrays: &[Array],
        cut: Split,
        target: Target,
    ) -> Result<Value, LaunchError> {
        let (runs, most_slices) = match cut {
            Split::Runs(runs) => (runs, 0),
            Split::Slices(most) => (1, most),
        };
        // A larger number makes no difference, since positions have 32 bits.
        let small = |number: i64| number.min(i32::MAX.into()) as usize;
        if let Some(value) = self.scores().value(argument.meaning) {
            return Ok(value);
        }
        let number = match argument.meaning {
            Meaning::Size(size) => self.size(size, target),
            Meaning::PageShift => self.page_shift() as usize,
            Meaning::SliceTiles => self.slice_tiles,
            Meaning::Runs => runs,
            Meaning::MostSlices => most_slices,
            Meaning::Interleave => small(self.interleave),
            Meaning::WorldSize => small(self.world_size),
            meaning => {
                let rows =
                    |array: &Array| 0..array.counts.map_or(1, |size| self.size(size, target));
                let value = array::value(arrays, meaning, &(0..1), rows);
                let none = || unreachable!("decode has no {meaning:?}");
                return argument.value(value.unwrap_or_else(none));
            }
        };
        argument.value(number as u64)
    }
}
