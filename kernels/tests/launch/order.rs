//! The order of a launch's blocks, and the addresses that stand in for missing arrays.

use burst_attention_kernels::instances::{Kernel, Target};
use burst_attention_kernels::launch::{
    Cast, Delta, Forward, KeyGrads, MAX_VIEW_BYTES, Rectangle, Rows, Statistics,
};
use burst_attention_kernels::record::Value;

use crate::samples::{K, O, Q, STATISTICS, cast, delta, forward, key_grads, query_grads, shape};
use crate::trial::{Trial, integer, pointer};

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
    // The group's queries and dout have 4 · 2048 rows: the same bytes, counted in key/value heads.
    assert_eq!(only_launch_has(Kernel::KeyGrads, shape(2048, 1024), "section"), 4);
    // A head that does not fit still shares a section with its group.
    assert_eq!(only_launch_has(Kernel::Forward, shape(64, 60_000), "section"), 4);
    assert_eq!(only_launch_has(Kernel::KeyGrads, shape(20_000, 64), "section"), 1);
    // Per head 8192 · (128 + 64) · 2 bytes = 3.1 MB with narrower values: seven fit.
    let narrow = Rectangle { value_dim: 64, batch: 7, ..keys };
    assert_eq!(only_launch_has(Kernel::Forward, narrow, "section"), 7 * 4);
    // All heads share a section where all fit.
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

#[test]
fn an_array_that_is_not_used_may_be_missing_and_another_stands_in() {
    let launches = forward(shape(100, 100)).launches(Target::Sm80).unwrap();
    assert_eq!(launches.len(), 1);
    for name in ["acc", "row_max", "row_sum"] {
        assert_eq!(pointer(&launches[0], name), Q.address, "{name}");
    }
    assert_eq!(integer(&launches[0], "acc_batch_stride"), 100 * 32 * 128);
    assert_eq!(integer(&launches[0], "stat_head_stride"), 100);

    let cast = cast(Rectangle { batch: 1, ..shape(10, 0) });
    let launches = cast.launches(Target::Sm80).unwrap();
    assert_eq!(integer(&launches[0], "has_b"), 0);
    assert_eq!(pointer(&launches[0], "b"), Q.address);
    let launches = Cast { b: Some(K), ..cast }.launches(Target::Sm80).unwrap();
    assert_eq!(integer(&launches[0], "has_b"), 1);
    assert_eq!(pointer(&launches[0], "b"), K.address);

    let delta = delta(shape(100, 100));
    let launches = delta.launches(Target::Sm80).unwrap();
    assert_eq!(integer(&launches[0], "has_zeros"), 0);
    assert_eq!(pointer(&launches[0], "zeros"), O.address);
    let launches = Delta { zeros: Some(K), ..delta }.launches(Target::Sm80).unwrap();
    assert_eq!(integer(&launches[0], "has_zeros"), 1);
    assert_eq!(pointer(&launches[0], "zeros"), K.address);
    assert_eq!(integer(&launches[0], "zeros_batch_stride"), 1 << 24);
}

#[test]
fn each_array_has_its_own_batch_stride() {
    let at = |address, batch_stride| Rows { address, batch_stride };
    let base = key_grads(shape(100, 100));
    let description = KeyGrads {
        q: at(0x1000, 1 << 20),
        k: at(0x2000, 2 << 20),
        v: at(0x3000, 3 << 20),
        dout: at(0x4000, 4 << 20),
        dk_acc: Some(at(0x5000, 5 << 20)),
        dv_acc: Some(at(0x6000, 6 << 20)),
        dk: Some(at(0x7000, 7 << 20)),
        dv: Some(at(0x8000, 8 << 20)),
        dq_acc: Some(at(0x9000, 9 << 20)),
        ..base
    };
    let launches = description.launches(Target::Sm90).unwrap();
    let names = ["q", "k", "v", "dout", "dk_acc", "dv_acc", "dk", "dv", "dq_acc"];
    for (name, times) in names.into_iter().zip(1..) {
        assert_eq!(pointer(&launches[0], name), times << 12, "{name}");
        let stride = integer(&launches[0], &format!("{name}_batch_stride"));
        assert_eq!(stride, i64::try_from(times).unwrap() << 20, "{name}");
    }
}

#[test]
fn a_sum_is_scaled() {
    for scale in [1.0, -0.25] {
        let cast = Cast { scale, ..cast(shape(10, 0)) };
        let launches = cast.launches(Target::Sm100).unwrap();
        assert_eq!(launches[0].value("scale"), Some(Value::F32(scale)));
    }
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

    // The address of an array without rows leads nowhere, and its stride may be 0.
    let empty = Rows { address: 8, batch_stride: 0 };
    let given = Forward { k: empty, v: empty, ..description };
    assert_eq!(given.launches(Target::Sm90).unwrap(), launches);

    let state = Forward { acc: Some(Q), first: false, last: false, ..description };
    assert_eq!(state.launches(Target::Sm90).unwrap(), [], "the state stays as it is");
}

#[test]
fn with_no_queries_key_gradients_are_written() {
    let (gone, none) = (Statistics::default(), Rows::default());
    let description = KeyGrads { q: none, dout: none, ..key_grads(shape(0, 100)) };
    let description = KeyGrads { lse_log2: gone, delta: gone, ..description };
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
    let queries = query_grads(shape(0, 100));
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
    assert_eq!(integer(&launches[0], "k_batch_stride"), 100 * 128);
    assert_eq!(integer(&launches[0], "v_batch_stride"), 100 * 128);
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
