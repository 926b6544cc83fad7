//! The functions that XLA calls: one for each target, platform and stage.
//!
//! A name holds the target, then `cuda` if CPU devices have the same target, then the stage. The
//! targets `burst_attention_virtual_…` run all ranks of a ring on one GPU.

use burst_attention::Pass;

use crate::cuda::LinearKind::{
    Attend, DeltaGrad, DeltaInverse, DeltaKeys, DeltaState, Pairs, State,
};
use crate::cuda::Spread::{Devices, Virtual};
use crate::cuda::Stage::{Execute, Initialize, Prepare};
use crate::cuda::{self, Platform, run, run_decode, run_linear};
use crate::decode;
use crate::error::Result;
use crate::handler;
use crate::linear::{self, Kind};
use crate::meeting;
use crate::sys::{XLA_FFI_CallFrame, XLA_FFI_Error};

/// The driver and NCCL of this machine.
const HERE: fn() -> Result<&'static Platform> = Platform::of_this_machine;

macro_rules! handlers {
    ($($name:ident => $function:path $(, $argument:expr)*;)*) => {$(
        #[doc = concat!("XLA's handler `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// The caller is XLA, and the frame is valid for the call.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(frame: *mut XLA_FFI_CallFrame) -> *mut XLA_FFI_Error {
            // SAFETY: XLA guarantees that the frame is valid for the call.
            unsafe { $function(frame $(, $argument)*) }
        }
    )*};
}

handlers! {
    burst_attention_forward_instantiate => handler::instantiate, Pass::Forward;
    burst_attention_forward_execute => handler::execute;
    burst_attention_backward_instantiate => handler::instantiate, Pass::Backward;
    burst_attention_backward_execute => handler::execute;

    burst_attention_linear_meeting_instantiate => meeting::instantiate;
    burst_attention_linear_meeting_execute => meeting::execute;

    burst_attention_linear_state_execute => linear::execute, Kind::State;
    burst_attention_linear_forward_execute => linear::execute, Kind::Forward;
    burst_attention_linear_backward_execute => linear::execute, Kind::Backward;

    burst_attention_delta_state_execute => linear::execute, Kind::DeltaState;
    burst_attention_delta_grad_state_execute => linear::execute, Kind::DeltaStateGradient;
    burst_attention_delta_forward_execute => linear::execute, Kind::DeltaForward;
    burst_attention_delta_backward_execute => linear::execute, Kind::DeltaBackward;

    burst_attention_decode_execute => decode::execute;
    burst_attention_decode_merge_execute => decode::merge;

    burst_attention_forward_cuda_instantiate => cuda::instantiate, Pass::Forward, Devices;
    burst_attention_forward_cuda_prepare => run, Prepare, HERE;
    burst_attention_forward_cuda_initialize => run, Initialize, HERE;
    burst_attention_forward_cuda_execute => run, Execute, HERE;
    burst_attention_backward_cuda_instantiate => cuda::instantiate, Pass::Backward, Devices;
    burst_attention_backward_cuda_prepare => run, Prepare, HERE;
    burst_attention_backward_cuda_initialize => run, Initialize, HERE;
    burst_attention_backward_cuda_execute => run, Execute, HERE;

    burst_attention_virtual_forward_instantiate => cuda::instantiate, Pass::Forward, Virtual;
    burst_attention_virtual_forward_initialize => run, Initialize, HERE;
    burst_attention_virtual_forward_execute => run, Execute, HERE;
    burst_attention_virtual_backward_instantiate => cuda::instantiate, Pass::Backward, Virtual;
    burst_attention_virtual_backward_initialize => run, Initialize, HERE;
    burst_attention_virtual_backward_execute => run, Execute, HERE;

    burst_attention_linear_parts_cuda_initialize =>
        run_linear, State, Initialize, HERE;
    burst_attention_linear_parts_cuda_execute =>
        run_linear, State, Execute, HERE;
    burst_attention_linear_attend_cuda_initialize =>
        run_linear, Attend, Initialize, HERE;
    burst_attention_linear_attend_cuda_execute =>
        run_linear, Attend, Execute, HERE;
    burst_attention_linear_pairs_cuda_initialize =>
        run_linear, Pairs, Initialize, HERE;
    burst_attention_linear_pairs_cuda_execute =>
        run_linear, Pairs, Execute, HERE;

    burst_attention_delta_inverse_cuda_initialize =>
        run_linear, DeltaInverse, Initialize, HERE;
    burst_attention_delta_inverse_cuda_execute =>
        run_linear, DeltaInverse, Execute, HERE;
    burst_attention_delta_parts_cuda_initialize =>
        run_linear, DeltaState, Initialize, HERE;
    burst_attention_delta_parts_cuda_execute =>
        run_linear, DeltaState, Execute, HERE;
    burst_attention_delta_grad_parts_cuda_initialize =>
        run_linear, DeltaGrad, Initialize, HERE;
    burst_attention_delta_grad_parts_cuda_execute =>
        run_linear, DeltaGrad, Execute, HERE;
    burst_attention_delta_keys_cuda_initialize =>
        run_linear, DeltaKeys, Initialize, HERE;
    burst_attention_delta_keys_cuda_execute =>
        run_linear, DeltaKeys, Execute, HERE;

    burst_attention_decode_pages_cuda_initialize => run_decode, Initialize, HERE;
    burst_attention_decode_pages_cuda_execute => run_decode, Execute, HERE;
}
