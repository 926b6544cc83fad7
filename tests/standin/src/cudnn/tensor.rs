//! Tensors of a graph: their description, and their values in float32.

use cudarc::cudnn::sys::cudnnBackendAttributeName_t::*;
use cudarc::cudnn::sys::cudnnDataType_t::*;
use half::{bf16, f16};

use super::descriptor::{BAD_PARAM, Descriptor, wrong};
use crate::call::Outcome;

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    Float32,
    Float16,
    Bfloat16,
    Int32,
    /// Exists within graphs alone.
    Boolean,
}

impl Element {
    fn of(number: i64) -> Outcome<Element> {
        let is = |wanted| number == wanted as i64;
        if is(CUDNN_DATA_FLOAT) {
            Ok(Element::Float32)
        } else if is(CUDNN_DATA_HALF) {
            Ok(Element::Float16)
        } else if is(CUDNN_DATA_BFLOAT16) {
            Ok(Element::Bfloat16)
        } else if is(CUDNN_DATA_INT32) {
            Ok(Element::Int32)
        } else if is(CUDNN_DATA_BOOLEAN) {
            Ok(Element::Boolean)
        } else {
            Err(wrong(BAD_PARAM, format!("data type {number}")))
        }
    }

    /// Returns the bytes of an element in memory.
    pub fn bytes(self) -> u64 {
        match self {
            Element::Float16 | Element::Bfloat16 => 2,
            Element::Float32 | Element::Int32 => 4,
            Element::Boolean => 1,
        }
    }

    /// Returns a value rounded to the type.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Element::Float16 => f16::from_f32(value).to_f32(),
            Element::Bfloat16 => bf16::from_f32(value).to_f32(),
            Element::Float32 | Element::Int32 | Element::Boolean => value,
        }
    }

    /// Reads an element.
    ///
    /// # Safety
    /// The caller must pass the address of one.
    unsafe fn read(self, at: u64) -> f32 {
        // SAFETY: the caller guarantees the element.
        unsafe {
            match self {
                Element::Float32 => (at as *const f32).read_unaligned(),
                Element::Int32 => (at as *const i32).read_unaligned() as f32,
                Element::Boolean => (at as *const u8).read().into(),
                Element::Float16 => (at as *const f16).read_unaligned().to_f32(),
                Element::Bfloat16 => (at as *const bf16).read_unaligned().to_f32(),
            }
        }
    }

    /// Writes an element.
    ///
    /// # Safety
    /// The caller must pass the address of one.
    unsafe fn write(self, at: u64, value: f32) {
        // SAFETY: the caller guarantees the element.
        unsafe {
            match self {
                Element::Float32 => (at as *mut f32).write_unaligned(value),
                Element::Int32 => (at as *mut i32).write_unaligned(value as i32),
                Element::Boolean => (at as *mut u8).write(value as u8),
                Element::Float16 => (at as *mut f16).write_unaligned(f16::from_f32(value)),
                Element::Bfloat16 => (at as *mut bf16).write_unaligned(bf16::from_f32(value)),
            }
        }
    }
}

/// The description of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    pub number: i64,
    pub element: Element,
    pub dims: [usize; 4],
    pub strides: [usize; 4],
    pub is_virtual: bool,
    /// Whether the host gives its value with each call.
    pub is_host: bool,
}

impl Tensor {
    /// Reads a description.
    ///
    /// # Errors
    /// If it is no tensor of four dimensions.
    pub fn of(descriptor: &Descriptor) -> Outcome<Tensor> {
        let four = |name| -> Outcome<[usize; 4]> {
            let found: Vec<_> =
                descriptor.numbers(name)?.into_iter().map(|number| number as usize).collect();
            found.try_into().map_err(|_| wrong(BAD_PARAM, "expected four dimensions"))
        };
        Ok(Tensor {
            number: descriptor.number(CUDNN_ATTR_TENSOR_UNIQUE_ID)?,
            element: Element::of(descriptor.number(CUDNN_ATTR_TENSOR_DATA_TYPE)?)?,
            dims: four(CUDNN_ATTR_TENSOR_DIMENSIONS)?,
            strides: four(CUDNN_ATTR_TENSOR_STRIDES)?,
            is_virtual: descriptor.number(CUDNN_ATTR_TENSOR_IS_VIRTUAL)? != 0,
            is_host: descriptor.number(CUDNN_ATTR_TENSOR_IS_BY_VALUE)? != 0,
        })
    }

    /// Returns the bytes from the first to the last element.
    pub fn span(&self) -> u64 {
        let last: usize =
            self.dims.iter().zip(self.strides).map(|(length, stride)| (length - 1) * stride).sum();
        (last as u64 + 1) * self.element.bytes()
    }

    /// Reads the values from memory.
    ///
    /// # Safety
    /// The caller must pass the address of such a tensor.
    pub unsafe fn load(&self, address: u64) -> Values {
        // SAFETY: the caller guarantees the memory.
        Values::new(self.dims, |at| unsafe { self.element.read(self.place(address, at)) })
    }

    /// Writes values to memory.
    ///
    /// # Safety
    /// The caller must pass the address of such a tensor.
    pub unsafe fn store(&self, address: u64, values: &Values) {
        for at in places(self.dims) {
            // SAFETY: the caller guarantees the memory.
            unsafe { self.element.write(self.place(address, at), values.get(at)) };
        }
    }

    fn place(&self, address: u64, at: [usize; 4]) -> u64 {
        let index: usize = at.iter().zip(self.strides).map(|(at, stride)| at * stride).sum();
        address + index as u64 * self.element.bytes()
    }
}

/// The values of a tensor.
#[derive(Debug, Clone)]
pub struct Values {
    pub dims: [usize; 4],
    numbers: Vec<f32>,
}

impl Values {
    /// Computes each value from its place.
    pub fn new(dims: [usize; 4], value: impl FnMut([usize; 4]) -> f32) -> Values {
        Values { dims, numbers: places(dims).map(value).collect() }
    }

    /// Returns the value at a place. A dimension of length 1 has the same value everywhere.
    pub fn get(&self, at: [usize; 4]) -> f32 {
        let at = at
            .iter()
            .zip(self.dims)
            .fold(0, |index, (at, length)| index * length + if length == 1 { 0 } else { *at });
        self.numbers[at]
    }

    /// Returns the values rounded to a type.
    pub fn rounded(mut self, element: Element) -> Values {
        self.numbers.iter_mut().for_each(|value| *value = element.round(*value));
        self
    }
}

fn places([a, b, c, d]: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    (0..a * b * c * d).map(move |at| [at / (b * c * d), at / (c * d) % b, at / d % c, at % d])
}
