//! The images: every instance's cubin, embedded as it is.

use crate::instances::Instance;
#[cfg(feature = "cuda")]
use crate::instances::{Element, Kernel, Target};

/// An instance and its cubin.
#[derive(Debug)]
pub struct Image {
    /// What it is.
    pub instance: Instance,
    /// What the driver loads.
    pub cubin: &'static [u8],
}

/// All images, in the order of [`Instance::all`].
#[cfg(feature = "cuda")]
pub static IMAGES: &[Image] = include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Built without the feature `cuda`: no images.
#[cfg(not(feature = "cuda"))]
pub static IMAGES: &[Image] = &[];

/// The image of an instance.
pub fn image(instance: &Instance) -> Option<&'static Image> {
    IMAGES.iter().find(|image| image.instance == *instance)
}
