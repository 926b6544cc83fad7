//! What versions of cuDNN refuse, take amiss and need, as the real ones were seen to do.

use cudarc::cudnn::sys::cudnnBackendAttributeName_t::*;
use cudarc::cudnn::sys::cudnnBackendKnobType_t::*;

use super::descriptor::{Descriptor, NOT_SUPPORTED, wrong};
use super::evaluate::Graph;
use crate::call::Outcome;
use crate::report::complain;
use crate::settings::settings;

/// Bytes of workspace of most plans.
const WORKSPACE: i64 = 256;
/// The first version whose backward pass reads statistics of any strides.
const ANY_STRIDES: u64 = 92_600;

/// The engine of a configuration: its index and its knobs by type.
type Engine = (i64, Vec<(i64, i64)>);

/// Returns the engine that a configuration names; `None` if cuDNN itself proposed the
/// configuration.
fn engine(config: &Descriptor) -> Outcome<Option<Engine>> {
    let Some(engine) = config.optional(CUDNN_ATTR_ENGINECFG_ENGINE) else { return Ok(None) };
    let knob = |choice: &Descriptor| {
        let kind = choice.number(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE)?;
        Ok((kind, choice.number(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE)?))
    };
    let knobs = config.descriptors(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES)?;
    let knobs = knobs.iter().map(|choice| knob(choice)).collect::<Outcome<_>>()?;
    Ok(Some((engine.number(CUDNN_ATTR_ENGINE_GLOBAL_INDEX)?, knobs)))
}

/// Whether the engine adds in a fixed order on Hopper.
fn is_of_hopper(engine: &Engine) -> bool {
    engine.0 == 6
}

/// Checks the engine of a configuration against the version and the kind of device.
///
/// # Errors
/// `NOT_SUPPORTED` if this version has no such engine.
pub fn check_config(config: &Descriptor) -> Outcome {
    let Some(engine) = engine(config)? else { return Ok(()) };
    let (version, (_, columns)) = (settings().cudnn, Graph::of_config(config)?.sizes()?);
    let has = |wanted| engine.1.iter().any(|(kind, _)| *kind == wanted as i64);
    let first = match settings().kind.capability.0 {
        9 if is_of_hopper(&engine) => 92_500,
        10 if engine.0 == 5 && (has(CUDNN_KNOB_TYPE_TILE_M) || columns == 256) => 92_300,
        10 if engine.0 == 5 => 0,
        _ => u64::MAX,
    };
    if version < first {
        let text = format!("engine {} with knobs {:?} of version {version}", engine.0, engine.1);
        return Err(wrong(NOT_SUPPORTED, text));
    }
    Ok(())
}

/// Complains about what a plan would compute wrong without a word.
pub fn check_plan(graph: &Graph) {
    if settings().cudnn >= ANY_STRIDES {
        return;
    }
    for tensor in graph.statistics_read() {
        let [_, heads, rows, _] = tensor.dims;
        if tensor.strides != [heads * rows, rows, 1, 1] {
            let (dims, strides) = (tensor.dims, tensor.strides);
            complain(format!(
                "cuDNN before 9.26 reads statistics without gaps, got strides {strides:?} of {dims:?}"
            ));
        }
    }
}

/// Returns the bytes of workspace that a configuration needs.
///
/// # Errors
/// If its graph is not known.
pub fn workspace_bytes(config: &Descriptor, graph: &Graph) -> Outcome<i64> {
    let is_of_hopper = engine(config)?.is_some_and(|engine| is_of_hopper(&engine));
    let ([batch, heads, rows, _], _) = graph.sizes()?;
    let blocks = (batch * heads * rows.div_ceil(64)) as i64;
    Ok(WORKSPACE + if is_of_hopper { 8 * blocks } else { 0 })
}
