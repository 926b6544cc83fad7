//! The arrays of decode's calls, with one row for each array.
//!
//! The handlers of both platforms read calls by this list, and the Python package orders operands by
//! it. An array of a feature needs a row here and its arithmetic.

use burst_attention::Dtype;
use burst_attention::host::array::HostArray;
use burst_attention::operands::{DeviceKind, ElementType};
use burst_attention_kernels::record::Size;

use crate::buffer::{Buffer, Number};
use crate::data_type::DataType;
use crate::error::{Error, Result};

/// When calls have an array.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Role {
    Operand,
    /// An operand of calls whose values are an array of their own. Other calls find the values in
    /// the first columns of the keys.
    OwnValues,
    /// An operand of calls with slopes.
    OfSlopes,
    Result,
}

/// The row of an array.
#[derive(Debug)]
struct Row {
    name: &'static str,
    /// Lengths on CPU devices and on GPUs; `None` where calls lack the array.
    dims: [Option<&'static [Size]>; 2],
    element: ElementType,
    role: Role,
}

const KEYS: &[Size] = &[Size::Pages, Size::PageRows, Size::KvHeads, Size::HeadDim];
const VALUES: &[Size] = &[Size::Pages, Size::PageRows, Size::KvHeads, Size::ValueDim];
const TABLE: &[Size] = &[Size::Sources, Size::SourcePages];

macro_rules! rows {
    (@ -) => { None };
    (@ $dims:ident) => { Some($dims) };
    (@ [$($dim:ident),*]) => { Some(&[$(Size::$dim),*]) };
    ($($name:literal: $host:tt, $cuda:tt, $element:ident, $role:ident;)*) => {
        &[$(Row {
            name: $name,
            dims: [rows!(@ $host), rows!(@ $cuda)],
            element: ElementType::$element,
            role: Role::$role,
        }),*]
    };
}

/// All arrays, in the order in which calls take and return them; on GPUs that of `Decode::ARRAYS`.
const ROWS: &[Row] = rows! {
    "query": [Batch, QLen, Heads, HeadDim], [Units, KvHeads, QLen, HeadDim], Activation, Operand;
    "key_cache": KEYS, KEYS, Activation, Operand;
    "value_cache": VALUES, VALUES, Activation, OwnValues;
    "page_table": TABLE, TABLE, Int32, Operand;
    "source": [Batch], -, Int32, Operand;
    "lengths": [Batch], -, Int32, Operand;
    "starts": [Batch], -, Int32, Operand;
    "query_lengths": [Batch], -, Int32, Operand;
    "units": -, [Units, Four], Int32, Operand;
    "intervals": -, [Units, Two, QLen], Int32, Operand;
    "rank": [], [], Int32, Operand;
    "counted_positions": -, [Units, QLen], Int32, OfSlopes;
    "slopes": [Heads], [Units, KvHeads, QLen], Float32, OfSlopes;
    "o": [Batch, QLen, Heads, ValueDim], [Units, KvHeads, QLen, ValueDim], Float32, Result;
    "lse": [Batch, QLen, Heads], [Units, KvHeads, QLen], Float32, Result;
};

/// Returns the rows of a platform, with their lengths.
fn rows(kind: DeviceKind) -> impl Iterator<Item = (&'static Row, &'static [Size])> {
    ROWS.iter().filter_map(move |row| Some((row, row.dims[kind as usize]?)))
}

/// Returns the names of all arrays of a platform, in order.
pub(crate) fn names(kind: DeviceKind) -> impl Iterator<Item = &'static str> {
    rows(kind).map(|(row, _)| row.name)
}

/// The arrays of a call.
#[derive(Debug)]
pub(crate) struct Arrays(Vec<(&'static Row, &'static [Size], Buffer)>);

impl Arrays {
    /// Pairs the arrays of a call with their rows. The other functions check types and lengths.
    pub fn read(
        kind: DeviceKind,
        has_values: bool,
        given: Vec<Buffer>,
        results: [Buffer; 2],
    ) -> Result<Arrays> {
        let count = |role| rows(kind).filter(|(row, _)| row.role == role).count();
        let values = if has_values { count(Role::OwnValues) } else { 0 };
        let least = count(Role::Operand) + values;
        let most = least + count(Role::OfSlopes);
        if ![least, most].contains(&given.len()) {
            let expected = format!("{least}, or {most} with slopes");
            return Err(Error::mismatch("number of operands", expected, given.len()));
        }
        let has = |role| match role {
            Role::OwnValues => has_values,
            Role::OfSlopes => given.len() == most,
            Role::Operand | Role::Result => true,
        };
        let present: Vec<_> = rows(kind).filter(|(row, _)| has(row.role)).collect();
        let all = present.into_iter().zip(given.into_iter().chain(results));
        let arrays: Vec<_> = all.map(|((row, dims), buffer)| (row, dims, buffer)).collect();
        for (row, dims, buffer) in &arrays {
            if dims.len() != buffer.dims.len() {
                let (name, rank) = (format!("rank of {}", row.name), dims.len().to_string());
                return Err(Error::mismatch(name, rank, buffer.dims.len()));
            }
        }
        Ok(Arrays(arrays))
    }

    /// Whether the call has an array.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(row, ..)| row.name == name)
    }

    /// Returns a length: that of the first array that has it.
    pub fn length(&self, size: Size) -> usize {
        let of = |(_, dims, buffer): &(_, &[Size], Buffer)| {
            dims.iter().position(|dim| *dim == size).map(|at| buffer.dims[at])
        };
        size.fixed().or_else(|| self.0.iter().find_map(of)).unwrap_or_default()
    }

    /// Returns the type of activations, which is that of the queries.
    pub fn activation(&self) -> DataType {
        self.0[0].2.dtype
    }

    /// Returns the address of an array of the right type and lengths; 0 without array or memory.
    pub fn address(&self, name: &str) -> Result<u64> {
        if !self.has(name) {
            return Ok(0);
        }
        let (buffer, dtype, dims) = self.find(name);
        buffer.address(name, dtype, &dims)
    }

    /// Returns an array of activations or floats, whose missing dimensions are 1.
    pub fn host(&self, name: &str) -> Result<HostArray> {
        let (buffer, dtype, dims) = self.find(name);
        let data = buffer.memory(name, dtype, &dims)?;
        let dims = std::array::from_fn(|at| dims.get(at).copied().unwrap_or(1));
        Ok(HostArray::jax(data, dtype.activation().unwrap_or(Dtype::F32), dims))
    }

    /// Returns the elements of an array of numbers.
    pub fn values<T: Number>(&self, name: &str) -> Result<&[T]> {
        let (buffer, _, dims) = self.find(name);
        buffer.values(name, &dims)
    }

    /// Returns an array of the call, with the type and the lengths that it must have.
    fn find(&self, name: &str) -> (&Buffer, DataType, Vec<usize>) {
        let found = self.0.iter().find(|(row, ..)| row.name == name);
        let (row, dims, buffer) = found.unwrap_or_else(|| unreachable!("no row of {name}"));
        let dtype = DataType::of(row.element, self.activation());
        (buffer, dtype, dims.iter().map(|size| self.length(*size)).collect())
    }
}
