//! Views of tensors in memory, and loads and stores of whole tiles through them.

use super::additions::Access;
use super::error::{Fault, Outcome, malformed, undefined, unsupported};
use super::machine::{Machine, Value};
use super::memory::Address;
use super::pointer::Mode;
use super::program::Step;
use super::tile::{Data, Element, Tile, tile_type, unsigned, walk, wrap};
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{Attribute, DYNAMIC, PaddingValue, TensorViewType, Type};
use std::rc::Rc;

/// A tensor in memory. Strides count elements.
#[derive(Debug)]
pub(super) struct TensorView {
    pub base: Address,
    element: Element,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

/// A grid of tiles over a tensor.
#[derive(Debug)]
pub(super) struct TileView {
    tensor: Rc<TensorView>,
    tile: Vec<usize>,
    /// Elements from one tile to the next, by axis of the tile.
    pace: Vec<u64>,
    /// The axis of the tensor for each axis of the tile.
    axes: Vec<usize>,
    padding: Option<PaddingValue>,
}

/// A tile's place in its tensor, by axis of the tile.
struct Window {
    first: Vec<u64>,
    /// Number of elements of the tile that lie in the tensor.
    inside: Vec<usize>,
}

/// Elements of a tile that lie in one row: place in the tile, address, number.
struct Run {
    place: usize,
    at: Address,
    count: usize,
}

impl TileView {
    /// Returns the number of tiles along each axis, with partial tiles.
    fn index_space(&self) -> Vec<u64> {
        let count = |(&axis, &pace): (&usize, &u64)| self.tensor.shape[axis].div_ceil(pace);
        self.axes.iter().zip(&self.pace).map(count).collect()
    }

    fn window(&self, index: &[u64]) -> Outcome<Window> {
        let space = self.index_space();
        if index.len() != space.len() || index.iter().zip(&space).any(|(at, size)| at >= size) {
            return undefined(format!("tile {index:?} of an index space {space:?}"));
        }
        let first: Vec<u64> = index.iter().zip(&self.pace).map(|(at, pace)| at * pace).collect();
        let inside = |(axis, &size): (usize, &usize)| {
            let left = self.tensor.shape[self.axes[axis]] - first[axis];
            usize::try_from(left).map_or(size, |left| left.min(size))
        };
        let inside = self.tile.iter().enumerate().map(inside).collect();
        Ok(Window { first, inside })
    }

    /// Returns the window row by row. Elements of a row whose stride is not 1 come one by one.
    fn runs(&self, window: &Window) -> Outcome<Vec<Run>> {
        let width = self.tensor.element.width() as i128;
        let stride = |axis: usize| i128::from(self.tensor.strides[self.axes[axis]]) * width;
        let offsets = window.first.iter().enumerate();
        let base = i128::from(self.tensor.base.0)
            + offsets.map(|(axis, &first)| i128::from(first) * stride(axis)).sum::<i128>();
        let rank = self.tile.len();
        let contiguous = rank > 0 && stride(rank - 1) == width;
        let rows = if contiguous { &window.inside[..rank - 1] } else { &window.inside[..] };
        let places = walk(rows, &super::tile::strides(&self.tile)[..rows.len()]);
        let count = if contiguous { window.inside[rank - 1] } else { 1 };
        let address = |row: usize| {
            let mut rest = row;
            let mut at = base;
            for axis in (0..rows.len()).rev() {
                at += (rest % rows[axis]) as i128 * stride(axis);
                rest /= rows[axis];
            }
            match i64::try_from(at) {
                Ok(at) => Ok(Address(at as u64)),
                Err(_) => undefined(format!("address {at:#x} of an element")),
            }
        };
        let run = |(row, place)| Ok(Run { place, at: address(row)?, count });
        places.into_iter().enumerate().map(run).collect()
    }

    /// Returns a tile of the value that loads give outside of the tensor.
    fn padded(&self) -> Outcome<Data> {
        let count = self.tile.iter().product();
        let element = self.tensor.element;
        let fill = match self.padding {
            None => return Ok(element.poison(count)),
            Some(PaddingValue::Zero) => 0.0,
            Some(other) if !element.is_float() => {
                return malformed(format!("padding {other:?} of {element:?}"));
            }
            Some(PaddingValue::NegZero) => -0.0,
            Some(PaddingValue::Nan) => f64::NAN,
            Some(PaddingValue::PosInf) => f64::INFINITY,
            Some(PaddingValue::NegInf) => f64::NEG_INFINITY,
        };
        Ok(match element.poison(0) {
            Data::Int(_) => Data::Int(vec![0; count]),
            Data::F32(_) => Data::F32(vec![fill as f32; count]),
            Data::F64(_) => Data::F64(vec![fill; count]),
        })
    }
}

impl<'a> Machine<'a> {
    pub fn make_view(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        let [result] = &step.op.result_types[..] else {
            return malformed("one result expected");
        };
        if let Type::TensorView(ty) = result.without_pointer_attribute() {
            return Ok(vec![Value::Tensor(Rc::new(self.tensor_view(step, ty)?))]);
        }
        let [source] = step.op.operands[..] else {
            return malformed("one operand expected");
        };
        let Value::Tensor(tensor) = self.value(source)?.clone() else {
            return malformed("a tensor view expected");
        };
        let source_type = |ty: &TensorViewType| {
            ty.shape.len() == tensor.shape.len()
                && Element::scalar(ty.element_type) == Ok(tensor.element)
        };
        let (ty, tile, pace, axes, padding) = match result.without_pointer_attribute() {
            Type::PartitionView(ty) => {
                (&ty.tensor_view, &ty.tile_shape, &ty.tile_shape, &ty.dim_map, ty.padding_value)
            }
            // The definition does not say which axes the pace counts under a permutation.
            Type::StridedView(ty) if ty.dim_map.is_sorted() => (
                &ty.tensor_view,
                &ty.tile_shape,
                &ty.traversal_strides,
                &ty.dim_map,
                ty.padding_value,
            ),
            other => return unsupported(cutile_ir::ir::format_type(other)),
        };
        let rank = tensor.shape.len();
        let mut sorted = axes.clone();
        sorted.sort_unstable();
        let positive = tile.iter().chain(pace).all(|&size| size > 0);
        let whole = tile.len() == rank && pace.len() == rank && positive;
        if !source_type(ty) || !whole || !sorted.into_iter().eq(0..rank as i32) {
            return malformed(cutile_ir::ir::format_type(result));
        }
        Ok(vec![Value::View(Rc::new(TileView {
            tile: tile.iter().map(|&size| size as usize).collect(),
            pace: pace.iter().map(|&size| size as u64).collect(),
            axes: axes.iter().map(|&axis| axis as usize).collect(),
            padding,
            tensor,
        }))])
    }

    fn tensor_view(&self, step: &Step, ty: &TensorViewType) -> Outcome<TensorView> {
        let groups = step.segments(3)?;
        let [base] = groups[0] else {
            return malformed("one base pointer expected");
        };
        let base = self.tile_of(*base)?;
        let element = Element::scalar(ty.element_type)?;
        if base.element != Element::Pointer(ty.element_type) {
            return malformed(format!("a view of {element:?} on {:?}", base.element));
        }
        let fill = |declared: &[i64], dynamic: &[cutile_ir::ir::Value]| {
            let mut dynamic = dynamic.iter();
            let mut next = || match dynamic.next() {
                Some(&value) => {
                    let tile = self.tile_of(value)?;
                    Ok(unsigned(tile.int()?, tile.bits()?))
                }
                None => malformed("a dynamic size or stride is missing"),
            };
            let one = |&size: &i64| if size == DYNAMIC { next() } else { Ok(size as u64) };
            let sizes = declared.iter().map(one).collect::<Outcome<Vec<u64>>>()?;
            if dynamic.next().is_some() {
                return malformed("more dynamic sizes or strides than the type has");
            }
            if !self.allow_zero_strides && sizes.contains(&0) {
                return undefined(format!("a size or stride of 0 in {sizes:?}"));
            }
            Ok(sizes)
        };
        let (shape, strides) = (fill(&ty.shape, groups[1])?, fill(&ty.strides, groups[2])?);
        if shape.len() != strides.len() {
            return malformed(format!("sizes {shape:?}, strides {strides:?}"));
        }
        let base = Address(base.int()? as u64);
        if !base.0.is_multiple_of(element.width() as u64) {
            return undefined(format!("base {base} of {element:?} is not aligned"));
        }
        Ok(TensorView { base, element, shape, strides })
    }

    pub fn view_shape(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        let [operand] = step.op.operands[..] else {
            return malformed("one operand expected");
        };
        let sizes = match (step.op.opcode, self.value(operand)?) {
            (Opcode::GetTensorShape, Value::Tensor(view)) => view.shape.clone(),
            (Opcode::GetIndexSpaceShape, Value::View(view)) => view.index_space(),
            (_, other) => return malformed(format!("the shape of {other:?}")),
        };
        if sizes.len() != step.op.result_types.len() {
            return malformed(format!("{} results for {sizes:?}", step.op.result_types.len()));
        }
        let one = |(&size, ty): (&u64, &Type)| {
            let (element, _) = tile_type(ty)?;
            let Some(bits) = element.int_bits() else {
                return malformed(format!("a size as {element:?}"));
            };
            let value = wrap(size.into(), bits);
            if unsigned(value, bits) != size {
                return undefined(format!("size {size} in {bits} bits"));
            }
            Ok(Value::Tile(Tile::new(element, [], Data::Int(vec![value]))))
        };
        sizes.iter().zip(&step.op.result_types).map(one).collect()
    }

    fn view_of(&self, group: &[cutile_ir::ir::Value]) -> Outcome<Rc<TileView>> {
        match group {
            [value] => match self.value(*value)? {
                Value::View(view) => Ok(view.clone()),
                other => malformed(format!("a tile view expected, got {other:?}")),
            },
            _ => malformed("one view expected"),
        }
    }

    /// Returns the window at the index operands. The promise `inbounds` must hold.
    fn window(
        &self,
        step: &Step,
        view: &TileView,
        indices: &[cutile_ir::ir::Value],
    ) -> Outcome<Window> {
        let index = |&value: &_| {
            let tile = self.tile_of(value)?;
            Ok(unsigned(tile.int()?, tile.bits()?))
        };
        let index = indices.iter().map(index).collect::<Outcome<Vec<u64>>>()?;
        let window = view.window(&index)?;
        let promised = match step.find("inbounds") {
            None => return Ok(window),
            Some(Attribute::Array(promised)) if promised.len() == index.len() => promised,
            Some(other) => return malformed(format!("inbounds {other:?}")),
        };
        for (axis, promise) in promised.iter().enumerate() {
            let Attribute::Bool(promise) = promise else {
                return malformed(format!("inbounds {promise:?}"));
            };
            if *promise && window.inside[axis] < view.tile[axis] {
                let what = format!("tile {index:?} inbounds along axis {axis}");
                return Err(Fault::Promise(what));
            }
        }
        Ok(window)
    }

    pub fn load_view(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        let groups = step.segments(3)?;
        if !matches!(step.int("memory_ordering_semantics")?, 0..=2) {
            return malformed("a load that is neither weak, relaxed nor acquire");
        }
        let view = self.view_of(groups[0])?;
        let window = self.window(step, &view, groups[1])?;
        let element = view.tensor.element;
        let mut data = view.padded()?;
        let mut bytes = vec![];
        for Run { place, at, count } in view.runs(&window)? {
            bytes.resize(count * element.width(), 0);
            self.memory.load(at, &mut bytes)?;
            element.decode(&bytes, &mut data, place)?;
        }
        let tile = Tile::new(element, view.tile.clone(), data);
        Ok(vec![Value::Tile(tile), Value::Token])
    }

    /// Stores a tile, without the elements outside of the tensor.
    pub fn store_view(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        let groups = step.segments(4)?;
        if !matches!(step.int("memory_ordering_semantics")?, 0 | 1 | 3) {
            return malformed("a store that is neither weak, relaxed nor release");
        }
        let view = self.view_of(groups[1])?;
        let tile = self.tile_for(&view, groups[0])?;
        let window = self.window(step, &view, groups[2])?;
        for Run { place, at, count } in view.runs(&window)? {
            self.memory.store(at, &tile.element.encode(&tile.data, place, count))?;
        }
        Ok(vec![Value::Token])
    }

    /// Combines a tile with memory, without the elements outside of the tensor.
    pub fn reduce_view(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        let groups = step.segments(4)?;
        let (ordering, scope) = (step.int("memory_ordering_semantics")?, step.int("memory_scope")?);
        if (ordering, scope) != (1, 1) {
            return unsupported(format!(
                "a reduction of ordering {ordering} and scope {scope}; expected relaxed (1) and \
                 device (1)"
            ));
        }
        let view = self.view_of(groups[0])?;
        if view.padding.is_some() {
            return malformed("a reduction through a padded view");
        }
        let tile = self.tile_for(&view, groups[2])?;
        let (element, width) = (tile.element, tile.element.width());
        let mode = Mode::of(step, element)?;
        if matches!(mode, Mode::Exchange) {
            return malformed("a reduction of mode 9, exchange");
        }
        let window = self.window(step, &view, groups[1])?;
        for Run { place, at, count } in view.runs(&window)? {
            self.memory.record(Access::Addition, at, count * width)?;
            for index in 0..count {
                let at = at.offset((index * width) as u64);
                let new = |old: &[u8]| mode.apply(element, old, &tile, place + index).map(Some);
                self.memory.combine(at, width, new)?;
            }
        }
        Ok(vec![Value::Token])
    }

    /// Returns the only tile of an operand group, which must have the view's type.
    fn tile_for(&self, view: &TileView, group: &[cutile_ir::ir::Value]) -> Outcome<Tile> {
        let [tile] = group else {
            return malformed("one tile expected");
        };
        let tile = self.tile_of(*tile)?;
        if tile.element != view.tensor.element || *tile.shape != *view.tile {
            return malformed(format!("{:?} of {:?} stored", tile.shape, tile.element));
        }
        Ok(tile)
    }
}
