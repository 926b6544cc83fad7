//! The CUDA kernels of BurstAttention as callers see them.
//!
//! [`kernel`] lists the kernels, [`record`] their arguments, [`features`] and [`instances`] the
//! images that exist. [`launch`] turns descriptions of what to compute into checked launches, and
//! [`backend`] chooses the code that computes each, and [`cost`] predicts its seconds. [`images`] finds the images that the driver
//! loads, [`host`] names the processors of GPUs' hosts.
//! The kernels' source and its compiler are the crate `burst-attention-compiler`. This crate knows
//! neither the ring nor XLA, nor the driver.

pub mod backend;
pub mod cost;
mod element;
mod error;
pub mod features;
pub mod host;
pub mod images;
pub mod instances;
pub mod kernel;
pub mod launch;
mod names;
mod place;
pub mod rates;
pub mod record;
mod scores;
mod target;
mod tiles;
pub mod variant;
