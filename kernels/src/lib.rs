//! CUDA kernels of BurstAttention: what there is and how it is launched.
//!
//! [`kernel`] lists the kernels, [`record`] says what each takes, [`features`] and [`instances`] which
//! images there are. [`launch`] turns what is to be computed into checked launches, [`images`] finds
//! what the driver loads, [`host`] says whose machine code an image holds besides the GPU's, [`cubin`]
//! reads what the compiler made. The kernels' source and its compiler are the crate
//! `burst-attention-compiler`. This crate knows neither the ring nor XLA, nor the driver.

pub mod cubin;
pub mod features;
pub mod host;
pub mod images;
pub mod instances;
pub mod kernel;
pub mod launch;
pub mod rates;
pub mod record;
mod tiles;
