//! The handlers of GPUs, called as XLA calls them, with a recorder in place of a device: what they
//! refuse, and what each failure leaves behind.

mod calls;
mod decode;
mod delta;
mod failures;
mod handlers;
mod linear;
