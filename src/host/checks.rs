//! Do a rank's arrays fit the problem?

use super::array::HostArray;
use super::extras::Extras;
use super::kernel::{BackwardBuffers, ForwardBuffers};
use crate::error::{Error, Result};
use crate::problem::{Dtype, Pass, Problem};

/// Checks the arrays of the forward pass.
///
/// # Errors
/// Names the first array that is missing, or has another shape or type than the problem gives it.
pub fn forward(problem: &Problem, io: &ForwardBuffers) -> Result<()> {
    let check = Checks(problem);
    check.inputs(&io.q, &io.k, &io.v)?;
    check.kept(&io.o)?;
    check.rows("lse", &io.lse)?;
    check_extras(problem, &io.extras, Pass::Forward)
}

/// Checks the arrays of the backward pass.
///
/// # Errors
/// As [`forward`].
pub fn backward(problem: &Problem, io: &BackwardBuffers) -> Result<()> {
    let check = Checks(problem);
    check.inputs(&io.q, &io.k, &io.v)?;
    check.kept(&io.o)?;
    check.rows("lse", &io.lse)?;
    check.outputs("dout", &io.dout)?;
    check.rows("dlse", &io.dlse)?;
    check.queries("dq", &io.dq)?;
    check.keys("dk", &io.dk)?;
    check.values("dv", &io.dv)?;
    check_extras(problem, &io.extras, Pass::Backward)
}

/// Shapes by what an array is.
struct Checks<'a>(&'a Problem);

impl Checks<'_> {
    fn inputs(&self, q: &HostArray, k: &HostArray, v: &HostArray) -> Result<()> {
        self.queries("q", q)?;
        self.keys("k", k)?;
        self.values("v", v)
    }

    fn queries(&self, name: &'static str, array: &HostArray) -> Result<()> {
        let Problem { q_len, heads, head_dim, dtype, .. } = *self.0;
        check_array(self.0, name, array, dtype, [q_len, heads, head_dim])
    }

    fn keys(&self, name: &'static str, array: &HostArray) -> Result<()> {
        let Problem { kv_len, kv_heads, head_dim, dtype, .. } = *self.0;
        check_array(self.0, name, array, dtype, [kv_len, kv_heads, head_dim])
    }

    fn values(&self, name: &'static str, array: &HostArray) -> Result<()> {
        let Problem { kv_len, kv_heads, value_dim, dtype, .. } = *self.0;
        check_array(self.0, name, array, dtype, [kv_len, kv_heads, value_dim])
    }

    fn outputs(&self, name: &'static str, array: &HostArray) -> Result<()> {
        let Problem { q_len, heads, value_dim, dtype, .. } = *self.0;
        check_array(self.0, name, array, dtype, [q_len, heads, value_dim])
    }

    /// o may have been kept in float32.
    fn kept(&self, o: &HostArray) -> Result<()> {
        let Problem { q_len, heads, value_dim, dtype, .. } = *self.0;
        let dtype = if o.dtype == Dtype::F32 { Dtype::F32 } else { dtype };
        check_array(self.0, "o", o, dtype, [q_len, heads, value_dim])
    }

    fn rows(&self, name: &'static str, array: &HostArray) -> Result<()> {
        check_array(self.0, name, array, Dtype::F32, [self.0.q_len, self.0.heads, 1])
    }
}

/// Every feature needs its arrays, and no other arrays may be there.
fn check_extras(problem: &Problem, extras: &Extras, pass: Pass) -> Result<()> {
    let Problem { q_len, kv_len, heads, features, .. } = *problem;
    let (per_head, backward) = ([1, heads, 1], pass == Pass::Backward);
    let arrays = [
        ("segments of queries", &extras.q_segments, features.segments, [q_len, 1, 1]),
        ("segments of keys", &extras.k_segments, features.segments, [kv_len, 1, 1]),
        ("slopes", &extras.slopes, features.slopes, per_head),
        ("numbers for dropout", &extras.dropout, features.dropout.is_some(), [1, 1, 4]),
        ("dslopes", &extras.dslopes, features.slopes && backward, per_head),
    ];
    arrays.into_iter().try_for_each(|(name, array, wanted, shape)| match (array, wanted) {
        (Some(array), true) => check_array(problem, name, array, Dtype::F32, shape),
        (None, false) => Ok(()),
        (array, _) => {
            let say = |given: bool| if given { "given" } else { "absent" };
            let (expected, got) = (say(wanted).to_owned(), say(array.is_some()).to_owned());
            Err(Error::InvalidProblem { name, expected, got })
        }
    })
}

fn check_array(
    problem: &Problem,
    name: &'static str,
    array: &HostArray,
    dtype: Dtype,
    [len, heads, dim]: [usize; 3],
) -> Result<()> {
    if array.dtype != dtype {
        return Err(Error::WrongDtype { name, expected: dtype, got: array.dtype });
    }
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
