//! Types of activations.

use crate::names::named;

named! {
    /// Type of the activations, with its name in the kernels' language.
    Element, "an element type" {
        /// bfloat16.
        Bf16 = "bf16",
        /// IEEE binary16.
        F16 = "f16",
    }
}

impl Element {
    /// Returns the bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Element::Bf16 | Element::F16 => 2,
        }
    }
}
