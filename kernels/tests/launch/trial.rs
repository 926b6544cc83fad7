//! Descriptions with made-up addresses, and the rows that their launches work on.

use std::ops::Range;

use burst_attention_kernels::instances::{Kernel, Target};
use burst_attention_kernels::launch::{
    Accumulate, AddGradient, Cast, CombineSoftmax, Delta, Dropout, EvenPositions, Features,
    FoldResult, Forward, KeyGrads, Launch, LaunchError, PackLse, QueryGrads, Rectangle, Rows,
    Segments, SoftmaxState, Statistics,
};
use burst_attention_kernels::record::Value;
use burst_attention_kernels::variant::{FeatureSet, Variant};

use crate::random::Random;

/// Kernels that have descriptions of their own, except the kernels of linear attention.
pub const KERNELS: [Kernel; 10] = [
    Kernel::Forward,
    Kernel::KeyGrads,
    Kernel::QueryGrads,
    Kernel::Delta,
    Kernel::Cast,
    Kernel::Accumulate,
    Kernel::AddGradient,
    Kernel::PackLse,
    Kernel::CombineSoftmax,
    Kernel::FoldResult,
];

/// The kernels of [`KERNELS`] that compute attention.
pub const PASSES: [Kernel; 3] = [Kernel::Forward, Kernel::KeyGrads, Kernel::QueryGrads];

/// Variants that trials choose from.
pub const CHOICES: [Variant; 10] = [
    Variant::PLAIN,
    Variant::PLAIN.with(FeatureSet::SEGMENTS),
    Variant::PLAIN.with(FeatureSet::SOFT_CAP),
    Variant::PLAIN.with(FeatureSet::SLOPES),
    Variant::PLAIN.with(FeatureSet::DROPOUT),
    Variant::PLAIN.with(FeatureSet::SEGMENTS.and(FeatureSet::SOFT_CAP)),
    Variant::PLAIN.with(FeatureSet::SLOPES.and(FeatureSet::DROPOUT)),
    Variant::GENERAL,
    Variant::FUSED,
    Variant::FUSED.with(FeatureSet::SEGMENTS),
];

/// An array of a trial.
struct Placed {
    name: &'static str,
    of_keys: bool,
    address: u64,
    bytes: u64,
    batch_stride: u64,
    row_stride: u64,
}

const POSITIONS: EvenPositions = EvenPositions { query: 7000, key: 2000, stride: 3 };
const SLOPES: u64 = 1 << 40;
const NUMBERS: u64 = 1 << 41;
const RANGES: u64 = 1 << 42;

/// A description with its launches.
pub struct Trial {
    pub kernel: Kernel,
    pub rectangle: Rectangle,
    /// The rectangle alone says whether there is a window. Launches are fused where a fused image
    /// exists.
    pub wanted: Variant,
    pub first: bool,
    pub last: bool,
    pub limit: u64,
    placed: Vec<Placed>,
    random: Random,
}

/// The rows that a launch works on, read back from its addresses and counts.
#[derive(Debug, PartialEq)]
pub struct Covered {
    pub batch: Range<usize>,
    pub queries: Range<usize>,
    pub keys: Range<usize>,
    /// The band, counted in the trial's rows.
    pub band: (i64, i64),
    pub first: bool,
    pub last: bool,
}

impl Covered {
    pub fn sees(&self, b: usize, i: usize, j: usize) -> bool {
        let seen = (self.band.0..=self.band.1).contains(&(j as i64 - i as i64));
        seen && self.batch.contains(&b) && self.queries.contains(&i) && self.keys.contains(&j)
    }
}

pub fn integer(launch: &Launch, name: &str) -> i64 {
    match launch.value(name) {
        Some(Value::I32(value)) => value.into(),
        other => panic!("{name} is {other:?}"),
    }
}

pub fn pointer(launch: &Launch, name: &str) -> u64 {
    match launch.value(name) {
        Some(Value::Pointer(address)) => address,
        other => panic!("{name} is {other:?}"),
    }
}

impl Trial {
    /// Returns a trial without features.
    pub fn new(kernel: Kernel, rectangle: Rectangle, limit: u64, seed: u64) -> Trial {
        let mut random = Random(seed);
        let streams = PASSES.contains(&kernel);
        let carries = streams || kernel == Kernel::CombineSoftmax;
        let (first, last) = (!streams || random.flip(), !carries || random.flip());
        let value_dim = if streams { rectangle.value_dim } else { rectangle.head_dim };
        let rectangle = Rectangle { value_dim, ..rectangle };
        let (wanted, placed) = (Variant::PLAIN, Vec::new());
        Trial { kernel, rectangle, wanted, first, last, limit, placed, random }
    }

    /// Returns the trial of another variant, if its kernel has several.
    pub fn with(self, wanted: Variant) -> Trial {
        if PASSES.contains(&self.kernel) { Trial { wanted, ..self } } else { self }
    }

    pub fn resident_is_keys(&self) -> bool {
        self.kernel == Kernel::KeyGrads
    }

    pub fn resident_rows(&self) -> usize {
        let Rectangle { q_len, kv_len, .. } = self.rectangle;
        if self.resident_is_keys() { kv_len } else { q_len }
    }

    /// Places an array. Arrays that share a stride in the record share it here.
    fn put(&mut self, name: &'static str, of_keys: bool, bytes: u64, row_stride: u64) -> Rows {
        let rectangle = &self.rectangle;
        let rows = if of_keys { rectangle.kv_len } else { rectangle.q_len } as u64;
        let address = (self.placed.len() as u64 + 1) << 44;
        let twin = match name {
            "dlse" => "lse",
            "dout" if self.kernel == Kernel::Delta => "o",
            name => name,
        };
        let twin = self.placed.iter().find(|placed| placed.name == twin);
        let padding = 8 * (self.random.next() % 3);
        let batch_stride = twin.map_or(rows * row_stride + padding, |twin| twin.batch_stride);
        let address =
            if bytes == 4 && !row_stride.is_multiple_of(8) { address + 4 } else { address };
        self.placed.push(Placed { name, of_keys, address, bytes, batch_stride, row_stride });
        Rows { address, batch_stride }
    }

    fn queries(&mut self, name: &'static str, bytes: u64) -> Rows {
        let row = self.rectangle.heads * self.rectangle.head_dim;
        self.put(name, false, bytes, row as u64)
    }

    /// Places an array with a row for each query and heads of keys.
    fn shared(&mut self, name: &'static str, bytes: u64) -> Rows {
        let row = self.rectangle.kv_heads * self.rectangle.head_dim;
        self.put(name, false, bytes, row as u64)
    }

    fn keys(&mut self, name: &'static str, bytes: u64) -> Rows {
        let row = self.rectangle.kv_heads * self.rectangle.head_dim;
        self.put(name, true, bytes, row as u64)
    }

    fn results(&mut self, name: &'static str, bytes: u64) -> Rows {
        let row = self.rectangle.heads * self.rectangle.value_dim;
        self.put(name, false, bytes, row as u64)
    }

    fn values(&mut self, name: &'static str, bytes: u64) -> Rows {
        let row = self.rectangle.kv_heads * self.rectangle.value_dim;
        self.put(name, true, bytes, row as u64)
    }

    fn per_query(&mut self, name: &'static str) -> Rows {
        let row = self.rectangle.heads as u64;
        self.put(name, false, 4, row)
    }

    fn statistics(&mut self, name: &'static str) -> Statistics {
        let padding = if name.starts_with("arrived") { 12 } else { 4 };
        let head_stride = (self.rectangle.q_len as u64).next_multiple_of(4) + padding;
        let batch_stride = self.rectangle.heads as u64 * head_stride + 8;
        let address = (self.placed.len() as u64 + 1) << 44;
        let row_stride = 1;
        let of_keys = false;
        self.placed.push(Placed { name, of_keys, address, bytes: 4, batch_stride, row_stride });
        Statistics { address, batch_stride, head_stride }
    }

    /// Returns the elements between the batch entries of segment ranges.
    fn ranges_stride(&self) -> u64 {
        4 * self.resident_rows().div_ceil(64) as u64 + 3
    }

    /// Returns the features with their arrays. Slopes, numbers and ranges have no rows, so
    /// [`Trial::covered`] does not compare them.
    fn features(&mut self) -> Features {
        let features = self.wanted.features;
        let segments = features.has(FeatureSet::SEGMENTS).then(|| Segments {
            queries: self.put("q_segments", false, 4, 1),
            keys: self.put("kv_segments", true, 4, 1),
            ranges: Rows { address: RANGES, batch_stride: self.ranges_stride() },
        });
        let slopes = Rows { address: SLOPES, batch_stride: self.rectangle.heads as u64 + 3 };
        let numbers = Rows { address: NUMBERS, batch_stride: 5 };
        Features {
            segments,
            soft_cap: if features.has(FeatureSet::SOFT_CAP) { 20.0 } else { 0.0 },
            slopes: features.has(FeatureSet::SLOPES).then_some(slopes),
            dropout: features.has(FeatureSet::DROPOUT).then_some(Dropout { numbers, rate: 0.2 }),
            positions: POSITIONS,
            visible: None,
        }
    }

    pub fn launches(&mut self, target: Target) -> Result<Vec<Launch>, LaunchError> {
        let Trial { kernel, rectangle, first, last, limit, .. } = *self;
        let Rectangle { batch, q_len, heads, head_dim, element, .. } = rectangle;
        let features = self.features();
        let fused =
            self.wanted.fused && KeyGrads::fused(rectangle, features).can_fuse(target).is_ok();
        let slopes = features.slopes.is_some();
        match kernel {
            Kernel::Forward => Forward {
                rectangle,
                features,
                q: self.queries("q", 2),
                k: self.keys("k", 2),
                v: self.values("v", 2),
                acc: Some(self.results("acc", 4)),
                row_max: Some(self.statistics("row_max")),
                row_sum: Some(self.statistics("row_sum")),
                o: Some(self.results("o", 2)),
                lse: Some(self.per_query("lse")),
                first,
                last,
            }
            .launches_within(target, limit),
            Kernel::KeyGrads => KeyGrads {
                rectangle,
                features,
                q: self.queries("q", 2),
                k: self.keys("k", 2),
                v: self.values("v", 2),
                dout: self.results("dout", 2),
                lse_log2: self.statistics("lse_log2"),
                delta: self.statistics("delta"),
                dk_acc: Some(self.keys("dk_acc", 4)),
                dv_acc: Some(self.values("dv_acc", 4)),
                dq_acc: fused.then(|| self.queries("dq_acc", 4)),
                fixed_order: false,
                results: None,
                dk: Some(self.keys("dk", 2)),
                dv: Some(self.values("dv", 2)),
                first,
                last,
            }
            .launches_within(target, limit),
            Kernel::QueryGrads => QueryGrads {
                rectangle,
                features,
                q: self.queries("q", 2),
                k: self.keys("k", 2),
                v: self.values("v", 2),
                dout: self.results("dout", 2),
                lse_log2: self.statistics("lse_log2"),
                delta: self.statistics("delta"),
                dq_acc: Some(self.queries("dq_acc", 4)),
                dq: Some(self.queries("dq", 2)),
                dslopes: slopes.then(|| self.per_query("dslopes")),
                first,
                last,
            }
            .launches_within(target, limit),
            Kernel::Delta => Delta {
                batch,
                q_len,
                heads,
                head_dim,
                element,
                o: self.queries("o", 2),
                dout: self.queries("dout", 2),
                lse: self.per_query("lse"),
                dlse: Some(self.per_query("dlse")),
                lse_log2: self.statistics("lse_log2"),
                delta: self.statistics("delta"),
                zeros: self.random.flip().then(|| self.queries("zeros", 4)),
            }
            .launches_within(target, limit),
            Kernel::Accumulate => Accumulate {
                batch,
                rows: q_len,
                heads,
                head_dim,
                home: self.queries("home", 4),
                arrived: self.queries("arrived", 4),
                scale: 0.5,
            }
            .launches_within(target, limit),
            Kernel::AddGradient => AddGradient {
                batch,
                rows: q_len,
                heads: rectangle.kv_heads,
                group: heads / rectangle.kv_heads,
                head_dim,
                element,
                home: Some(self.shared("home", 4)),
                arrived: self.queries("arrived", 2),
                scale: 0.5,
                out: Some(self.shared("out", 2)),
                first,
                last,
            }
            .launches_within(target, limit),
            Kernel::PackLse => PackLse {
                batch,
                q_len,
                heads,
                lse: self.per_query("lse"),
                packed: self.statistics("packed_lse"),
            }
            .launches_within(target, limit),
            Kernel::FoldResult => FoldResult {
                batch,
                q_len,
                heads,
                head_dim,
                element,
                home: Some(SoftmaxState {
                    acc: self.results("acc", 4),
                    row_max: self.statistics("row_max"),
                    row_sum: self.statistics("row_sum"),
                }),
                arrived_o: self.results("arrived_o", 2),
                arrived_lse: self.statistics("arrived_lse"),
                o: Some(self.results("o", 2)),
                lse: Some(self.per_query("lse")),
                first,
                last,
            }
            .launches_within(target, limit),
            Kernel::CombineSoftmax => CombineSoftmax {
                batch,
                q_len,
                heads,
                head_dim,
                element,
                home: SoftmaxState {
                    acc: self.results("acc", 4),
                    row_max: self.statistics("row_max"),
                    row_sum: self.statistics("row_sum"),
                },
                arrived: SoftmaxState {
                    acc: self.results("arrived_acc", 4),
                    row_max: self.statistics("arrived_max"),
                    row_sum: self.statistics("arrived_sum"),
                },
                o: Some(self.results("o", 2)),
                lse: Some(self.per_query("lse")),
                last,
            }
            .launches_within(target, limit),
            _ => Cast {
                batch,
                rows: q_len,
                heads,
                head_dim,
                element,
                a: self.queries("a", 4),
                b: Some(self.queries("b", 4)),
                out: self.queries("out", 2),
                scale: 0.25,
            }
            .launches_within(target, limit),
        }
    }

    /// Returns the launches of the trial's kernel, without the launches that compare segments.
    pub fn main<'a>(&self, launches: &'a [Launch]) -> impl Iterator<Item = &'a Launch> {
        let kernel = self.kernel;
        launches.iter().filter(move |launch| launch.instance().kernel == kernel)
    }

    /// Returns the rows that a launch works on. All its arrays must agree on batch entries and
    /// rows.
    pub fn covered(&self, launch: &Launch) -> Covered {
        let starts = |of_keys: bool| {
            let side = self.placed.iter().filter(|placed| placed.of_keys == of_keys);
            let mut starts: Vec<_> = side.map(|placed| self.start(launch, placed)).collect();
            starts.dedup();
            assert!(starts.len() <= 1, "{} arrays disagree: {starts:?}", launch.instance());
            starts.first().copied()
        };
        let optional = |name: &str| launch.value(name).map(|_| integer(launch, name));
        let (b, i) = starts(false).unwrap();
        let (key_b, j) = starts(true).unwrap_or((b, 0));
        assert_eq!(b, key_b, "keys are of other batch entries");
        let q_len = optional("q_len").or(optional("rows")).unwrap() as usize;
        let kv_len = optional("kv_len").unwrap_or(0) as usize;
        let shift = j as i64 - i as i64;
        if let Some(query) = optional("q_position") {
            let EvenPositions { query: of_query, key: of_key, stride } = POSITIONS;
            assert_eq!(query, of_query + stride * i as i64, "{launch:?}");
            assert_eq!(integer(launch, "k_position"), of_key + stride * j as i64, "{launch:?}");
            // Where a feature is off, another array stands in for the feature's array.
            for (feature, name, begin, stride) in [
                (FeatureSet::DROPOUT, "dropout", NUMBERS, 5),
                (FeatureSet::SLOPES, "slopes", SLOPES, self.rectangle.heads as u64 + 3),
                (FeatureSet::SEGMENTS, "ranges", RANGES, self.ranges_stride()),
            ] {
                let expected = begin + 4 * stride * b as u64;
                let is_there = pointer(launch, name) == expected;
                assert_eq!(is_there, self.wanted.has(feature), "{name} of {launch:?}");
            }
        }
        let band = (optional("lower").unwrap_or(1), optional("upper").unwrap_or(0));
        Covered {
            batch: b..b + integer(launch, "batch") as usize,
            queries: i..i + q_len,
            keys: j..j + kv_len,
            band: (band.0 + shift, band.1 + shift),
            first: optional("first").is_none_or(|first| first == 1),
            last: optional("last").is_none_or(|last| last == 1),
        }
    }

    fn start(&self, launch: &Launch, placed: &Placed) -> (usize, usize) {
        let bytes = pointer(launch, placed.name) - placed.address;
        assert_eq!(bytes % placed.bytes, 0, "{}", placed.name);
        let elements = bytes / placed.bytes;
        let (b, rest) = (elements / placed.batch_stride, elements % placed.batch_stride);
        assert_eq!(rest % placed.row_stride, 0, "{} is within a row", placed.name);
        (b as usize, (rest / placed.row_stride) as usize)
    }
}
