//! The order of a launch's blocks, and what takes the place of arrays that are not there.

use burst_attention_kernels::instances::{Element, Kernel, Target};
use burst_attention_kernels::launch::{
    Finish, Forward, KeyGrads, MAX_VIEW_BYTES, QueryGrads, Rectangle, Rows, Statistics,
};
use burst_attention_kernels::record::Value;

use crate::trial::{Trial, integer, pointer};

pub fn shape(q_len: usize, kv_len: usize) -> Rectangle {
    Rectangle {
        batch: 2,
        q_len,
        kv_len,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        value_dim: 128,
        element: Element::F16,
        lower: i64::MIN,
        upper: i64::MAX,
        softmax_scale: 0.5,
    }
}

fn only_launch_has(kernel: Kernel, shape: Rectangle, name: &str) -> i64 {
    let launches = Trial::new(kernel, shape, MAX_VIEW_BYTES, 1).launches(Target::Sm90).unwrap();
    assert_eq!(launches.len(), 1);
    integer(&launches[0], name)
}

#[test]
fn a_section_streams_what_fits_in_the_cache() {
    // Per key/value head 8192 · 128 · 2 · 2 bytes = 4.2 MB: five fit in 24 MB, four divide 16.
    let keys = shape(1024, 8192);
    assert_eq!(only_launch_has(Kernel::Forward, keys, "section"), 4 * 4);
    assert_eq!(only_launch_has(Kernel::QueryGrads, keys, "section"), 4 * 4);
    // The group's queries and dout, 4 · 2048 rows: the same bytes, counted in key/value heads.
    assert_eq!(only_launch_has(Kernel::KeyGrads, shape(2048, 1024), "section"), 4);
    // One head that does not fit is still worked on with its group.
    assert_eq!(only_launch_has(Kernel::Forward, shape(64, 60_000), "section"), 4);
    assert_eq!(only_launch_has(Kernel::KeyGrads, shape(20_000, 64), "section"), 1);
    // Per head 8192 · (128 + 64) · 2 bytes = 3.1 MB with narrower values: seven fit.
    let narrow = Rectangle { value_dim: 64, batch: 7, ..keys };
    assert_eq!(only_launch_has(Kernel::ForwardGeneral, narrow, "section"), 7 * 4);
    // All heads where all fit.
    assert_eq!(only_launch_has(Kernel::Forward, shape(512, 512), "section"), 2 * 32);
}

#[test]
fn the_tiles_that_see_most_come_first() {
    let with = |lower, upper| Rectangle { lower, upper, ..shape(4096, 4096) };
    let queries = [Kernel::Forward, Kernel::QueryGrads];
    for kernel in queries {
        assert_eq!(only_launch_has(kernel, with(i64::MIN, 0), "reverse"), 1);
        assert_eq!(only_launch_has(kernel, with(0, i64::MAX), "reverse"), 0);
        assert_eq!(only_launch_has(kernel, with(i64::MIN, i64::MAX), "reverse"), 0);
    }
    assert_eq!(only_launch_has(Kernel::KeyGrads, with(i64::MIN, 0), "reverse"), 0);
    assert_eq!(only_launch_has(Kernel::KeyGrads, with(0, i64::MAX), "reverse"), 1);
}

const Q: Rows = Rows { address: 0x1000, batch_stride: 1 << 24 };
const K: Rows = Rows { address: 0x2000, batch_stride: 1 << 24 };
const O: Rows = Rows { address: 0x3000, batch_stride: 1 << 24 };
const LSE: Rows = Rows { address: 0x4000, batch_stride: 1 << 24 };
const STATISTICS: Statistics =
    Statistics { address: 0x5000, batch_stride: 1 << 24, head_stride: 1 << 16 };

/// A forward pass with no state.
pub fn forward(rectangle: Rectangle) -> Forward {
    Forward {
        rectangle,
        general: None,
        q: Q,
        k: K,
        v: K,
        acc: None,
        row_max: None,
        row_sum: None,
        o: Some(O),
        lse: Some(LSE),
        first: true,
        last: true,
    }
}

#[test]
fn an_array_that_is_not_used_may_be_missing_and_another_stands_in() {
    let launches = forward(shape(100, 100)).launches(Target::Sm80).unwrap();
    assert_eq!(launches.len(), 1);
    for name in ["acc", "row_max", "row_sum"] {
        assert_eq!(pointer(&launches[0], name), Q.address, "{name}");
    }
    assert_eq!(integer(&launches[0], "acc_batch_stride"), 100 * 32 * 128);
    assert_eq!(integer(&launches[0], "stat_head_stride"), 100);

    let finish = Finish {
        batch: 1,
        rows: 10,
        heads: 1,
        head_dim: 64,
        element: Element::Bf16,
        a: Q,
        b: None,
        out: O,
    };
    let launches = finish.launches(Target::Sm80).unwrap();
    assert_eq!(integer(&launches[0], "has_b"), 0);
    assert_eq!(pointer(&launches[0], "b"), Q.address);
    let launches = Finish { b: Some(K), ..finish }.launches(Target::Sm80).unwrap();
    assert_eq!(integer(&launches[0], "has_b"), 1);
    assert_eq!(pointer(&launches[0], "b"), K.address);
}

#[test]
fn with_no_keys_results_are_written_and_nothing_is_streamed() {
    let none = Rows::default();
    let description = Forward { k: none, v: none, ..forward(shape(100, 0)) };
    let launches = description.launches(Target::Sm90).unwrap();
    assert_eq!(launches.len(), 1);
    let launch = &launches[0];
    assert_eq!((integer(launch, "first"), integer(launch, "last")), (1, 1));
    assert_eq!((pointer(launch, "k"), integer(launch, "kv_len")), (Q.address, 1));
    assert!(integer(launch, "lower") > 100 && integer(launch, "upper") < -100);

    // An address of no rows leads nowhere, and their stride may be 0.
    let empty = Rows { address: 8, batch_stride: 0 };
    let given = Forward { k: empty, v: empty, ..description };
    assert_eq!(given.launches(Target::Sm90).unwrap(), launches);

    let state = Forward { acc: Some(Q), first: false, last: false, ..description };
    assert_eq!(state.launches(Target::Sm90).unwrap(), [], "the state stays as it is");
}

#[test]
fn with_no_queries_key_gradients_are_written() {
    let gone = Statistics::default();
    let description = KeyGrads {
        rectangle: shape(0, 100),
        general: None,
        q: Rows::default(),
        k: K,
        v: K,
        dout: Rows::default(),
        lse_log2: gone,
        delta: gone,
        dk_acc: None,
        dv_acc: None,
        dk: Some(O),
        dv: Some(O),
        first: true,
        last: true,
    };
    let launches = description.launches(Target::Sm90).unwrap();
    assert_eq!(launches.len(), 1);
    for name in ["q", "dout", "lse_log2", "delta", "dk_acc"] {
        assert_eq!(pointer(&launches[0], name), K.address, "{name}");
    }
}

#[test]
fn nothing_to_write_is_no_launch() {
    assert_eq!(forward(shape(0, 100)).launches(Target::Sm90).unwrap(), []);
    let empty = Rectangle { batch: 0, ..shape(100, 100) };
    assert_eq!(forward(empty).launches(Target::Sm90).unwrap(), []);
    let queries = QueryGrads {
        rectangle: shape(0, 100),
        general: None,
        q: Q,
        k: K,
        v: K,
        dout: Q,
        lse_log2: STATISTICS,
        delta: STATISTICS,
        dq_acc: None,
        dq: Some(O),
        dslopes: None,
        first: true,
        last: true,
    };
    assert_eq!(queries.launches(Target::Sm90).unwrap(), []);
}

#[test]
fn strides_that_lead_nowhere_may_be_anything() {
    let rectangle = Rectangle { batch: 1, heads: 1, kv_heads: 1, ..shape(100, 100) };
    let odd = |rows: Rows, batch_stride| Rows { batch_stride, ..rows };
    let statistics = Statistics { head_stride: 7 << 40, ..STATISTICS };
    let description = Forward {
        q: odd(Q, (5 << 40) + 1),
        k: odd(K, 3),
        v: odd(K, 5),
        acc: Some(Q),
        row_max: Some(statistics),
        row_sum: Some(STATISTICS),
        ..forward(rectangle)
    };
    let launches = Forward { last: false, ..description }.launches(Target::Sm90).unwrap();
    assert_eq!(integer(&launches[0], "q_batch_stride"), 100 * 128);
    assert_eq!(integer(&launches[0], "kv_batch_stride"), 100 * 128);
    assert_eq!(integer(&launches[0], "stat_head_stride"), 100);
}

#[test]
fn the_scale_is_turned_to_base_2() {
    let launches = forward(shape(100, 100)).launches(Target::Sm90).unwrap();
    let half_log2_e = 0.5 * std::f32::consts::LOG2_E;
    assert_eq!(launches[0].value("scale_log2"), Some(Value::F32(half_log2_e)));
    let launches = Trial::new(Kernel::KeyGrads, shape(64, 64), MAX_VIEW_BYTES, 1)
        .launches(Target::Sm90)
        .unwrap();
    assert_eq!(launches[0].value("softmax_scale"), Some(Value::F32(0.5)));
}
