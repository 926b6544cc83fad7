//! Which ways branches and loops of the kernels go, where data decide: both ways; and no turn, one
//! and several.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::rc::Rc;

use burst_attention_interpreter::{Line, Place, Reach, Turns};
use burst_attention_kernels::instances::Instance;
use burst_attention_kernels::kernel::Kernel;

/// Kernels whose cases run together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    Attention,
    Rows,
    Linear,
    DeltaRule,
    Decode,
    Latents,
}

impl Group {
    fn of(kernel: Kernel) -> Group {
        use Kernel::*;
        match kernel {
            Forward | KeyGrads | QueryGrads | SegmentRanges | MaskRows | MaskRuns => {
                Group::Attention
            }
            Delta | Cast | Accumulate | AddGradient | PackLse | CombineSoftmax | FoldResult => {
                Group::Rows
            }
            LinearState | LinearAttend | ChannelPairs => Group::Linear,
            DeltaRuleInverse | DeltaRuleState | DeltaRuleGrad | DeltaRuleKeys => Group::DeltaRule,
            Decode | DecodeMerge => Group::Decode,
            DecodeLatents | LatentWeights | LatentValues => Group::Latents,
        }
    }

    /// Asserts that `cases` take every branch of the group's kernels both ways, and that every loop
    /// has no turn, one turn, and in each variant several turns. [`EXCEPTIONS`] say which do not.
    pub fn assert_reached(self, cases: impl FnOnce()) {
        RECORD.set(Some(Record::new()));
        cases();
        let record = RECORD.take().expect("the record of this thread");
        let mut lacks = vec![];
        for kernel in Kernel::ALL.into_iter().filter(|&kernel| Group::of(kernel) == self) {
            let turns = turns_of(&record, |of| of.kernel == kernel);
            lacks.extend(turns.iter().flat_map(|(place, turns)| {
                let (none, once) = match place.is_loop {
                    true => ("no turn", "one turn"),
                    false => ("not taken", "taken"),
                };
                let ways = [(none, turns.none), (once, turns.once)];
                ways.map(|(way, went)| (!went).then(|| Lack::new(kernel.name(), place, way)))
            }));
            for &variant in kernel.spec().variants {
                let name = format!("{}{variant}", kernel.name());
                let is_of = |of: &Instance| (of.kernel, of.variant) == (kernel, variant);
                assert!(record.keys().any(is_of), "no case runs {name}");
                let turns = turns_of(&record, is_of);
                let loops = turns.iter().filter(|(place, _)| place.is_loop);
                lacks.extend(loops.map(|(place, turns)| {
                    (!turns.several).then(|| Lack::new(&name, place, "several turns"))
                }));
            }
        }
        self.assert_exceptions(lacks.into_iter().flatten().collect());
    }

    /// Asserts that what places lack, and nothing else, is an exception.
    fn assert_exceptions(self, mut lacks: Vec<Lack>) {
        for exception in EXCEPTIONS.iter().filter(|exception| exception.groups.contains(&self)) {
            let count = lacks.len();
            lacks.retain(|lack| !exception.covers(lack));
            assert!(lacks.len() < count, "no exception any more: {exception:?}");
        }
        let lacks: Vec<_> = lacks.iter().map(Lack::to_string).collect();
        assert!(lacks.is_empty(), "no case of {self:?} goes these ways:\n{}", lacks.join("\n"));
    }
}

/// A way that no case goes.
struct Lack {
    kernel: String,
    place: Place,
    /// Text of the place's own line.
    text: String,
    way: &'static str,
}

impl Lack {
    fn new(kernel: &str, place: &Place, way: &'static str) -> Lack {
        let text = place.lines.first().map_or_else(String::new, source);
        Lack { kernel: kernel.into(), place: place.clone(), text, way }
    }
}

impl std::fmt::Display for Lack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Lack { kernel, place, text, way } = self;
        let lines = place.lines.iter().map(|Line { file, line, .. }| format!("{file}:{line}"));
        let lines = lines.collect::<Vec<_>>().join(" in ");
        write!(f, "{kernel}, {way}: `{text}` ({lines}, {})", place.index)
    }
}

/// Ways that no case can take a branch or a loop.
#[derive(Debug)]
struct Exception {
    groups: &'static [Group],
    file: &'static str,
    /// The line of the branch or loop. Calls from several places share it.
    text: &'static str,
    ways: &'static [&'static str],
    /// Why no case can.
    #[expect(dead_code, reason = "for readers, and in the message of a failure")]
    reason: &'static str,
}

impl Exception {
    fn covers(&self, lack: &Lack) -> bool {
        let file = lack.place.lines.first().map(|line| line.file.as_str());
        let is_here = (file, lack.text.as_str()) == (Some(self.file), self.text);
        is_here && self.ways.contains(&lack.way)
    }
}

use Group::*;

const A_TOKEN: &str = "a launch has no part without a token, so each part has a tile";
const SIX: &str = "a tile of 64 tokens has six levels; the compiler must not know that";
const NO_ROWS: &str = "a launch that streams no rows does not ask which of them rows see";

#[rustfmt::skip]
const EXCEPTIONS: [Exception; 15] = [
    Exception { groups: &[DeltaRule], file: "delta_inverse.rs", text: "for i in tiles.0..tiles.0 + tiles.1 {", ways: &["no turn"], reason: A_TOKEN },
    Exception { groups: &[DeltaRule], file: "delta_rule.rs", text: "for i in tiles.0..tiles.0 + tiles.1 {", ways: &["no turn"], reason: A_TOKEN },
    Exception { groups: &[DeltaRule], file: "delta_rule.rs", text: "for back in 0i32..tiles.1 {", ways: &["no turn"], reason: A_TOKEN },
    Exception { groups: &[DeltaRule], file: "delta_keys.rs", text: "for back in 0i32..tiles.1 {", ways: &["no turn"], reason: A_TOKEN },
    Exception { groups: &[Linear], file: "linear.rs", text: "for t in 0i32..tiles.1 {", ways: &["no turn"], reason: A_TOKEN },
    Exception { groups: &[Linear], file: "channels.rs", text: "for i in tiles.0..tiles.0 + tiles.1 {", ways: &["no turn"], reason: A_TOKEN },
    Exception { groups: &[Linear], file: "channels.rs", text: "while level < levels(i) {", ways: &["no turn", "one turn"], reason: SIX },
    Exception { groups: &[Linear, DeltaRule], file: "channels.rs", text: "while level < levels(place.tile) {", ways: &["no turn", "one turn"], reason: SIX },
    Exception { groups: &[DeltaRule], file: "delta_inverse.rs", text: "for _level in 0i32..levels {", ways: &["no turn", "one turn"], reason: "blocks of 2 tokens become one of 64 in five steps; the compiler must not know that" },
    Exception { groups: &[Decode, Latents], file: "pages.rs", text: "while start <= last {", ways: &["no turn"], reason: "a block with work has a tile, which lies in a page" },
    Exception { groups: &[Decode, Latents], file: "pieces.rs", text: "while start < run_count {", ways: &["no turn"], reason: "without slices the work is cut into at least one run" },
    Exception { groups: &[Latents], file: "latent_values.rs", text: "while start < high {", ways: &["no turn"], reason: "a block with work has a tile" },
    Exception { groups: &[Rows], file: "rows.rs", text: "for member in 0i32..group {", ways: &["no turn"], reason: "a group has a head" },
    Exception { groups: &[Attention], file: "segments.rs", text: "for chunk in 0i32..ceil_div(kv_len, CHUNK) {", ways: &["no turn"], reason: NO_ROWS },
    Exception { groups: &[Attention], file: "masks.rs", text: "for chunk in 0i32..ceil_div(kv_len, CHUNK) {", ways: &["no turn"], reason: NO_ROWS },
];
const _: () = assert!(EXCEPTIONS.len() <= 30, "more exceptions than readers can check");

type Record = BTreeMap<Instance, Rc<RefCell<Reach>>>;

thread_local! {
    /// What launches of this thread reach, of each image, while a test asks for it.
    static RECORD: RefCell<Option<Record>> = const { RefCell::new(None) };
}

/// Returns the record to which launches of an image add what they reach, if a test asks for it.
pub fn reach_of(instance: &Instance) -> Option<Rc<RefCell<Reach>>> {
    let of_image = |record: &mut Record| record.entry(*instance).or_default().clone();
    RECORD.with_borrow_mut(|record| record.as_mut().map(of_image))
}

/// Returns the turns of the places of some images.
fn turns_of(record: &Record, is_of: impl Fn(&Instance) -> bool) -> BTreeMap<Place, Turns> {
    let mut all = BTreeMap::<Place, Turns>::new();
    for (_, reach) in record.iter().filter(|(instance, _)| is_of(instance)) {
        for (place, turns) in &reach.borrow().turns {
            all.entry(place.clone()).or_default().join(*turns);
        }
    }
    all
}

/// Returns the text of a line of the kernels' source.
fn source(Line { file, line, .. }: &Line) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../compiler/src/device");
    let text = fs::read_to_string(folder.join(file));
    let text = text.unwrap_or_else(|error| panic!("{file}: {error}"));
    let line = text.lines().nth(*line as usize - 1).expect("the file has the line");
    line.trim().to_owned()
}
