//! The values that operations take and return.

use super::error::{Outcome, malformed, unsupported};
use cutile_ir::ir::{ScalarType, TileElementType, TileType, Type};
use half::{bf16, f16};
use std::rc::Rc;

/// The element type of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    Scalar(ScalarType),
    Pointer(ScalarType),
}

/// Elements in row-major order. Integers and pointers are sign-extended to 64 bits; float16 and
/// bfloat16 are the float32 of the same value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Data {
    Int(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
}

/// A tile. Copies share the elements.
#[derive(Debug, Clone)]
pub(super) struct Tile {
    pub element: Element,
    pub shape: Rc<[usize]>,
    pub data: Rc<Data>,
}

/// Evaluates an expression for the vector that the data holds, and wraps the result in the same
/// way.
macro_rules! map_data {
    ($data:expr, $values:ident => $body:expr) => {
        match $data {
            Data::Int($values) => Data::Int($body),
            Data::F32($values) => Data::F32($body),
            Data::F64($values) => Data::F64($body),
        }
    };
}

impl Element {
    /// Returns the element type of a tile's type, if the interpreter computes with it.
    pub fn of(element: &TileElementType) -> Outcome<Self> {
        match element {
            TileElementType::Scalar(scalar) => Self::scalar(*scalar),
            TileElementType::Pointer(pointer) => {
                Self::scalar(pointer.pointee)?;
                Ok(Self::Pointer(pointer.pointee))
            }
        }
    }

    pub fn scalar(scalar: ScalarType) -> Outcome<Self> {
        use ScalarType::*;
        match scalar {
            I1 | I8 | I16 | I32 | I64 | F16 | BF16 | F32 | F64 => Ok(Self::Scalar(scalar)),
            other => unsupported(format!("element type {other:?}")),
        }
    }

    /// Returns the bits of an integer type; `None` for floats and pointers.
    pub fn int_bits(self) -> Option<u32> {
        match self {
            Self::Scalar(ScalarType::I1) => Some(1),
            Self::Scalar(ScalarType::I8) => Some(8),
            Self::Scalar(ScalarType::I16) => Some(16),
            Self::Scalar(ScalarType::I32) => Some(32),
            Self::Scalar(ScalarType::I64) => Some(64),
            _ => None,
        }
    }

    pub fn is_float(self) -> bool {
        matches!(self, Self::Scalar(scalar) if scalar.is_float())
    }

    /// Returns the bytes in memory.
    pub fn width(self) -> usize {
        match self {
            Self::Scalar(scalar) => scalar.byte_width(),
            Self::Pointer(_) => 8,
        }
    }

    /// Returns `count` times the value of unspecified elements: NaN or -1.
    pub fn poison(self, count: usize) -> Data {
        match self {
            Self::Scalar(ScalarType::F64) => Data::F64(vec![f64::NAN; count]),
            _ if self.is_float() => Data::F32(vec![f32::NAN; count]),
            _ => Data::Int(vec![-1; count]),
        }
    }

    /// Rounds float32 results to the type, to nearest even.
    pub fn round(self, values: &mut [f32]) {
        match self {
            Self::Scalar(ScalarType::BF16) => {
                values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
            }
            Self::Scalar(ScalarType::F16) => {
                values.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
            }
            _ => {}
        }
    }

    /// Reads elements of the type from bytes into `out`, from place `first` on.
    pub fn decode(self, bytes: &[u8], out: &mut Data, first: usize) -> Outcome<()> {
        use ScalarType::*;
        let scalar = match self {
            Self::Scalar(scalar) => scalar,
            Self::Pointer(_) => I64,
        };
        match out {
            Data::Int(out) => match scalar {
                I1 => copy::<1, _>(bytes, &mut out[first..], |x| -i64::from(x[0] & 1)),
                I8 => copy::<1, _>(bytes, &mut out[first..], |x| i8::from_le_bytes(x).into()),
                I16 => copy::<2, _>(bytes, &mut out[first..], |x| i16::from_le_bytes(x).into()),
                I32 => copy::<4, _>(bytes, &mut out[first..], |x| i32::from_le_bytes(x).into()),
                I64 => copy::<8, _>(bytes, &mut out[first..], i64::from_le_bytes),
                other => return malformed(format!("{other:?} read into integers")),
            },
            Data::F32(out) => match scalar {
                F16 => copy::<2, _>(bytes, &mut out[first..], |x| f16::from_le_bytes(x).to_f32()),
                BF16 => copy::<2, _>(bytes, &mut out[first..], |x| bf16::from_le_bytes(x).to_f32()),
                F32 => copy::<4, _>(bytes, &mut out[first..], f32::from_le_bytes),
                other => return malformed(format!("{other:?} read into float32")),
            },
            Data::F64(out) => copy::<8, _>(bytes, &mut out[first..], f64::from_le_bytes),
        }
        Ok(())
    }

    /// Returns the bytes of `count` elements from `first` on.
    pub fn encode(self, data: &Data, first: usize, count: usize) -> Vec<u8> {
        use ScalarType::*;
        let range = first..first + count;
        match data {
            Data::Int(values) => match (&values[range], self.int_bits()) {
                (values, Some(1)) => bytes(values, |x| [x as u8 & 1]),
                (values, Some(8)) => bytes(values, |x| (x as i8).to_le_bytes()),
                (values, Some(16)) => bytes(values, |x| (x as i16).to_le_bytes()),
                (values, Some(32)) => bytes(values, |x| (x as i32).to_le_bytes()),
                (values, _) => bytes(values, i64::to_le_bytes),
            },
            Data::F32(values) => match self {
                Self::Scalar(BF16) => bytes(&values[range], |x| bf16::from_f32(x).to_le_bytes()),
                Self::Scalar(F16) => bytes(&values[range], |x| f16::from_f32(x).to_le_bytes()),
                _ => bytes(&values[range], f32::to_le_bytes),
            },
            Data::F64(values) => bytes(&values[range], f64::to_le_bytes),
        }
    }
}

/// Returns the bytes of all elements.
fn bytes<const W: usize, T: Copy>(values: &[T], to: impl Fn(T) -> [u8; W]) -> Vec<u8> {
    let mut bytes = vec![0; W * values.len()];
    let (chunks, _) = bytes.as_chunks_mut::<W>();
    chunks.iter_mut().zip(values).for_each(|(chunk, x)| *chunk = to(*x));
    bytes
}

fn copy<const W: usize, T>(bytes: &[u8], out: &mut [T], from: impl Fn([u8; W]) -> T) {
    let (chunks, _) = bytes.as_chunks::<W>();
    chunks.iter().zip(out).for_each(|(chunk, slot)| *slot = from(*chunk));
}

impl Data {
    pub fn len(&self) -> usize {
        match self {
            Self::Int(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
        }
    }

    /// Returns the elements at the given places, in the given order.
    pub fn gather(&self, places: impl Iterator<Item = usize>) -> Self {
        map_data!(self, values => places.map(|place| values[place]).collect())
    }
}

impl Tile {
    pub fn new(element: Element, shape: impl Into<Rc<[usize]>>, data: Data) -> Self {
        let shape = shape.into();
        debug_assert_eq!(shape.iter().product::<usize>(), data.len());
        Self { element, shape, data: Rc::new(data) }
    }

    pub fn scalar_int(bits: ScalarType, value: i64) -> Self {
        Self::new(Element::Scalar(bits), [], Data::Int(vec![value]))
    }

    pub fn ints(&self) -> Outcome<&[i64]> {
        match &*self.data {
            Data::Int(values) => Ok(values),
            _ => malformed(format!("integers expected, got {:?}", self.element)),
        }
    }

    pub fn f32s(&self) -> Outcome<&[f32]> {
        match &*self.data {
            Data::F32(values) => Ok(values),
            _ => malformed(format!("float32 or narrower expected, got {:?}", self.element)),
        }
    }

    /// Returns the only element of an integer tile.
    pub fn int(&self) -> Outcome<i64> {
        match self.ints()? {
            [value] => Ok(*value),
            values => malformed(format!("a scalar expected, got {} elements", values.len())),
        }
    }

    pub fn bits(&self) -> Outcome<u32> {
        let bits = self.element.int_bits();
        bits.map_or_else(|| malformed(format!("integers expected, got {:?}", self.element)), Ok)
    }

    /// Returns a tile with the same element for each of `lanes` lanes.
    pub fn splat(&self, lanes: usize) -> Self {
        Self::new(self.element, [lanes], self.data.gather(std::iter::repeat_n(0, lanes)))
    }

    pub fn reshaped(&self, shape: impl Into<Rc<[usize]>>) -> Self {
        Self { element: self.element, shape: shape.into(), data: self.data.clone() }
    }
}

/// Returns the row-major strides of a shape.
pub(super) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    strides
}

/// Returns for each index of `shape`, in row-major order, the sum of index times stride.
pub(super) fn walk(shape: &[usize], strides: &[usize]) -> Vec<usize> {
    let mut places = vec![0];
    for (&size, &stride) in shape.iter().zip(strides) {
        let outer = places;
        places = Vec::with_capacity(outer.len() * size);
        for base in outer {
            places.extend((0..size).map(|index| base + index * stride));
        }
    }
    places
}

/// Returns the low `bits` bits of a value, sign-extended.
pub(super) fn wrap(value: i128, bits: u32) -> i64 {
    let shift = 128 - bits;
    (value << shift >> shift) as i64
}

/// Returns the low `bits` bits of a sign-extended value as an unsigned number.
pub(super) fn unsigned(value: i64, bits: u32) -> u64 {
    value as u64 & (u64::MAX >> (64 - bits))
}

/// Returns element and shape of a tile's type.
pub(super) fn tile_type(ty: &Type) -> Outcome<(Element, Vec<usize>)> {
    let (element, shape) = declared_tile(ty)?;
    let size = |&size: &i64| match usize::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => malformed(format!("tile of size {size}")),
    };
    Ok((element, shape.iter().map(size).collect::<Outcome<_>>()?))
}

/// Returns element and shape of a tile's type without a copy of the shape, because every step of a
/// program checks the types of its results.
pub(super) fn declared_tile(ty: &Type) -> Outcome<(Element, &[i64])> {
    match ty.without_pointer_attribute() {
        Type::Tile(TileType { shape, element_type }) => Ok((Element::of(element_type)?, shape)),
        other => malformed(format!("a tile expected, got {}", cutile_ir::ir::format_type(other))),
    }
}
