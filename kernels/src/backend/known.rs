//! Costs that are known. A call asks for the same ones each time it runs, and each takes microseconds
//! to predict.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use super::Backend;
use crate::cost::Cost;
use crate::element::Element;
use crate::features::Features;
use crate::launch::{Forward, KeyGrads, QueryGrads, Rectangle, TileOperation};
use crate::target::Target;

/// Most costs that are kept.
const MOST: usize = 1 << 12;

/// All that the cost of a pass over a rectangle depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Question {
    backend: &'static str,
    target: Target,
    operation: &'static str,
    rows: [usize; 3],
    heads: [usize; 2],
    columns: [usize; 2],
    element: Element,
    band: [i64; 2],
    ends: [bool; 2],
    /// Whether there are features, dq comes too, and sums have a fixed order.
    kind: [bool; 3],
}

/// Returns what an operation costs by a backend, if anything is known.
pub(super) fn cost(
    backend: &'static Backend,
    operation: &TileOperation,
    target: Target,
) -> Option<Cost> {
    static KNOWN: LazyLock<Mutex<HashMap<Question, Option<Cost>>>> = LazyLock::new(Mutex::default);
    let predict = || (backend.cost)(operation, target);
    let Some(question) = question(backend.name, operation, target) else { return predict() };
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cost) = known().get(&question) {
        return *cost;
    }
    let cost = predict();
    let mut known = known();
    if known.len() == MOST {
        known.clear();
    }
    known.insert(question, cost);
    cost
}

/// Returns the question about an operation; `None` if its cost takes no time to predict.
fn question(backend: &'static str, operation: &TileOperation, target: Target) -> Option<Question> {
    let (rectangle, features, ends, of_keys) = match operation {
        TileOperation::Forward(Forward { rectangle, features, first, last, .. })
        | TileOperation::QueryGrads(QueryGrads { rectangle, features, first, last, .. }) => {
            (rectangle, features, [*first, *last], [false; 2])
        }
        TileOperation::KeyGrads(tile) => {
            let KeyGrads { rectangle, features, first, last, dq_acc, fixed_order, .. } = tile;
            (rectangle, features, [*first, *last], [dq_acc.is_some(), *fixed_order])
        }
        _ => return None,
    };
    let Rectangle { batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, .. } = *rectangle;
    Some(Question {
        backend,
        target,
        operation: operation.name(),
        rows: [batch, q_len, kv_len],
        heads: [heads, kv_heads],
        columns: [head_dim, value_dim],
        element: rectangle.element,
        band: [rectangle.lower, rectangle.upper],
        ends,
        kind: [*features != Features::default(), of_keys[0], of_keys[1]],
    })
}
