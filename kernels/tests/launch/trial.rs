//! Descriptions with made-up addresses, and what their launches say of the rows they work on.

use std::ops::Range;

use burst_attention_kernels::instances::{Element, Kernel, Target};
use burst_attention_kernels::launch::{
    Delta, Dropout, Finish, Forward, General, Join, KeyGrads, Launch, LaunchError, Merge,
    Positions, QueryGrads, Rectangle, Rows, State, Statistics,
};
use burst_attention_kernels::record::Value;

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    pub fn flip(&mut self) -> bool {
        self.below(2) == 1
    }
}

/// An array of a trial.
struct Placed {
    name: &'static str,
    of_keys: bool,
    address: u64,
    bytes: u64,
    batch_stride: u64,
    row_stride: u64,
}

const POSITIONS: Positions = Positions { query: 7000, key: 2000, stride: 3 };
const SLOPES: u64 = 1 << 40;
const NUMBERS: u64 = 1 << 41;

/// A description with its launches.
pub struct Trial {
    pub kernel: Kernel,
    pub rectangle: Rectangle,
    pub first: bool,
    pub last: bool,
    pub limit: u64,
    placed: Vec<Placed>,
    random: Random,
}

/// What a launch works on, read back from its addresses and counts.
#[derive(Debug, PartialEq)]
pub struct Part {
    pub batch: Range<usize>,
    pub queries: Range<usize>,
    pub keys: Range<usize>,
    /// The band in the trial's own rows.
    pub band: (i64, i64),
    pub first: bool,
    pub last: bool,
}

impl Part {
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
    pub fn new(kernel: Kernel, rectangle: Rectangle, limit: u64, seed: u64) -> Trial {
        let mut random = Random(seed);
        let streams = kernel.is_attention();
        let carries = streams || kernel == Kernel::Join;
        let (first, last) = (!streams || random.flip(), !carries || random.flip());
        let value_dim =
            if kernel == kernel.plain() { rectangle.head_dim } else { rectangle.value_dim };
        let rectangle = Rectangle { value_dim, ..rectangle };
        Trial { kernel, rectangle, first, last, limit, placed: Vec::new(), random }
    }

    pub fn resident_is_keys(&self) -> bool {
        self.kernel.plain() == Kernel::KeyGrads
    }

    /// Where an array lies; arrays of one `twin` share their stride.
    fn put(&mut self, name: &'static str, of_keys: bool, bytes: u64, row_stride: u64) -> Rows {
        let rectangle = &self.rectangle;
        let rows = if of_keys { rectangle.kv_len } else { rectangle.q_len } as u64;
        let address = (self.placed.len() as u64 + 1) << 44;
        let twin = match name {
            "dlse" => "lse",
            name if self.kernel != self.kernel.plain() => name,
            "v" => "k",
            "dv" => "dk",
            "dv_acc" => "dk_acc",
            "dout" if self.kernel == Kernel::Delta => "o",
            "dout" => "q",
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
        let padding = if name.starts_with("came") { 12 } else { 4 };
        let head_stride = (self.rectangle.q_len as u64).next_multiple_of(4) + padding;
        let batch_stride = self.rectangle.heads as u64 * head_stride + 8;
        let address = (self.placed.len() as u64 + 1) << 44;
        let row_stride = 1;
        let of_keys = false;
        self.placed.push(Placed { name, of_keys, address, bytes: 4, batch_stride, row_stride });
        Statistics { address, batch_stride, head_stride }
    }

    /// One per entry and head, in no rows: apart from what [`Trial::part`] compares.
    fn slopes(&mut self) -> Rows {
        Rows { address: SLOPES, batch_stride: self.rectangle.heads as u64 + 3 }
    }

    pub fn launches(&mut self, target: Target) -> Result<Vec<Launch>, LaunchError> {
        let Trial { kernel, rectangle, first, last, limit, .. } = *self;
        let Rectangle { batch, q_len, heads, head_dim, element, .. } = rectangle;
        let general = (kernel != kernel.plain()).then(|| General {
            q_segments: self.put("q_segments", false, 4, 1),
            kv_segments: self.put("kv_segments", true, 4, 1),
            soft_cap: 20.0,
            slopes: Some(self.slopes()),
            dropout: Some(Dropout {
                numbers: Rows { address: NUMBERS, batch_stride: 5 },
                rate: 0.2,
            }),
            positions: POSITIONS,
        });
        match kernel.plain() {
            Kernel::Forward => Forward {
                rectangle,
                general,
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
                general,
                q: self.queries("q", 2),
                k: self.keys("k", 2),
                v: self.values("v", 2),
                dout: self.results("dout", 2),
                lse_log2: self.statistics("lse_log2"),
                delta: self.statistics("delta"),
                dk_acc: Some(self.keys("dk_acc", 4)),
                dv_acc: Some(self.values("dv_acc", 4)),
                dk: Some(self.keys("dk", 2)),
                dv: Some(self.values("dv", 2)),
                first,
                last,
            }
            .launches_within(target, limit),
            Kernel::QueryGrads => QueryGrads {
                rectangle,
                general,
                q: self.queries("q", 2),
                k: self.keys("k", 2),
                v: self.values("v", 2),
                dout: self.results("dout", 2),
                lse_log2: self.statistics("lse_log2"),
                delta: self.statistics("delta"),
                dq_acc: Some(self.queries("dq_acc", 4)),
                dq: Some(self.queries("dq", 2)),
                dslopes: general.map(|_| self.per_query("dslopes")),
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
            }
            .launches_within(target, limit),
            Kernel::Merge => Merge {
                batch,
                rows: q_len,
                heads,
                head_dim,
                home: self.queries("home", 4),
                arrived: self.queries("arrived", 4),
            }
            .launches_within(target, limit),
            Kernel::Join => Join {
                batch,
                q_len,
                heads,
                head_dim,
                element,
                home: State {
                    acc: self.results("acc", 4),
                    row_max: self.statistics("row_max"),
                    row_sum: self.statistics("row_sum"),
                },
                came: State {
                    acc: self.results("came_acc", 4),
                    row_max: self.statistics("came_max"),
                    row_sum: self.statistics("came_sum"),
                },
                o: Some(self.results("o", 2)),
                lse: Some(self.per_query("lse")),
                last,
            }
            .launches_within(target, limit),
            _ => Finish {
                batch,
                rows: q_len,
                heads,
                head_dim,
                element,
                a: self.queries("a", 4),
                b: Some(self.queries("b", 4)),
                out: self.queries("out", 2),
            }
            .launches_within(target, limit),
        }
    }

    /// Reads a launch back; every array must say the same of the batch entries and rows.
    pub fn part(&self, launch: &Launch) -> Part {
        let starts = |of_keys: bool| {
            let side = self.placed.iter().filter(|placed| placed.of_keys == of_keys);
            let mut starts: Vec<_> = side.map(|placed| self.start(launch, placed)).collect();
            starts.dedup();
            assert!(starts.len() <= 1, "{} arrays disagree: {starts:?}", launch.instance);
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
            let Positions { query: of_query, key: of_key, stride } = POSITIONS;
            assert_eq!(query, of_query + stride * i as i64, "{launch:?}");
            assert_eq!(integer(launch, "k_position"), of_key + stride * j as i64, "{launch:?}");
            assert_eq!(pointer(launch, "dropout"), NUMBERS + 4 * 5 * b as u64, "{launch:?}");
            let strides = b as u64 * (self.rectangle.heads as u64 + 3);
            assert_eq!(pointer(launch, "slopes"), SLOPES + 4 * strides, "{launch:?}");
        }
        let band = (optional("lower").unwrap_or(1), optional("upper").unwrap_or(0));
        Part {
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

/// A rectangle of up to `rows` rows a side.
pub fn rectangle(random: &mut Random, rows: usize) -> Rectangle {
    let kv_heads = 1 + random.below(3);
    let (q_len, kv_len) = (1 + random.below(rows), 1 + random.below(rows));
    let diagonal = random.below(2 * rows) as i64 - rows as i64;
    let (lower, upper) = match random.below(6) {
        0 => (i64::MIN, i64::MAX),
        1 => (i64::MIN, diagonal),
        2 => (diagonal, i64::MAX),
        3 => (diagonal - random.below(rows) as i64, diagonal),
        4 => (diagonal, diagonal - 1 - random.below(3) as i64),
        _ => (i64::MIN, 0),
    };
    Rectangle {
        batch: 1 + random.below(4),
        q_len,
        kv_len,
        heads: kv_heads * (1 + random.below(3)),
        kv_heads,
        head_dim: random.of(&[8, 16, 64, 72, 128, 256]),
        value_dim: random.of(&[8, 24, 64, 128, 192]),
        element: random.of(&Element::ALL),
        lower,
        upper,
        softmax_scale: 0.125,
    }
}
