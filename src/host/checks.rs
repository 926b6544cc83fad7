//! Checks that a rank's arrays fit the problem.

use super::array::HostArray;
use crate::error::{Error, Result};
use crate::operands::{Arrays, DeviceKind, Dim, ElementType, Operand};
use crate::problem::{Dtype, Problem};
use crate::types::invalid;

/// Checks that a rank has exactly the arrays of its pass, and that each array has the shape and
/// type that the problem gives it.
///
/// # Errors
/// The error names the first array that is missing, superfluous, or of a wrong shape or type.
pub fn arrays(problem: &Problem, arrays: &Arrays<HostArray>) -> Result<()> {
    let wanted = Arrays::new(arrays.pass, &problem.features, |_| ());
    Operand::all().try_for_each(|operand| match (arrays.get(operand), wanted.get(operand)) {
        (Some(array), Some(())) => check_array(problem, operand, array),
        (None, None) => Ok(()),
        (array, wanted) => {
            let say = |given: bool| if given { "given" } else { "absent" }.to_owned();
            let (expected, got) = (say(wanted.is_some()), say(array.is_some()));
            Err(Error::InvalidProblem { name: operand.name(), expected, got })
        }
    })
}

/// Returns `[rows, heads, columns]` of an array on the host. A length that the array lacks is 1.
pub fn host_dims(problem: &Problem, operand: Operand) -> [usize; 3] {
    let mut lengths = [1; 3];
    for dim in operand.dims(DeviceKind::Host) {
        let axis = match dim {
            Dim::QLen | Dim::KvLen => 0,
            Dim::Heads | Dim::KvHeads => 1,
            Dim::HeadDim | Dim::ValueDim | Dim::Number(_) => 2,
        };
        lengths[axis] = problem.length(*dim);
    }
    lengths
}

/// Returns the element types that an array may have on the host. The executor declares arrays of
/// 32-bit integers as float32: it copies them, but never computes with them as floats.
fn host_dtypes(problem: &Problem, operand: Operand) -> [Dtype; 2] {
    match operand.element(DeviceKind::Host) {
        ElementType::Activation => [problem.dtype; 2],
        ElementType::ActivationOrFloat32 => [problem.dtype, Dtype::F32],
        ElementType::Float32 | ElementType::Int32 | ElementType::Uint32 => [Dtype::F32; 2],
    }
}

fn check_array(problem: &Problem, operand: Operand, array: &HostArray) -> Result<()> {
    let name = operand.name();
    let dtypes = host_dtypes(problem, operand);
    if !dtypes.contains(&array.dtype) {
        return Err(invalid(name, dtypes[0].to_string(), array.dtype));
    }
    let [len, heads, dim] = host_dims(problem, operand);
    let expected = (problem.batch, 0..len, heads, dim);
    let got = (array.batch, array.rows.clone(), array.heads, array.dim);
    if expected != got {
        let show = |(batch, rows, heads, dim): (usize, std::ops::Range<usize>, usize, usize)| {
            format!("[{batch}, {}, {heads}, {dim}]", rows.len())
        };
        let (expected, got) = (show(expected), show(got));
        return Err(Error::InvalidProblem { name, expected, got });
    }
    Ok(())
}
