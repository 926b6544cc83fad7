//! Small cubins for tests, put together section by section.

/// The contents of a cubin for a test.
pub(super) struct Synthetic {
    pub(super) number: u8,
    /// Contents of `.nv.compat`.
    pub(super) compat: Vec<u8>,
    /// Names of functions and whether each is a kernel; the first has the sections below.
    pub(super) functions: Vec<(&'static str, bool)>,
    /// Records of `.nv.info`: attribute, function (by its place in `functions`) and value.
    pub(super) info: Vec<(u8, u32, u32)>,
    /// Contents of the kernel's own `.nv.info`.
    pub(super) own: Vec<u8>,
    pub(super) shared: u64,
    /// Contents of `.nv.host` and of its copy `.nv.merc.nv.host`, if the cubin has them.
    pub(super) hosts: Vec<Vec<u8>>,
}

/// Returns a record with a value of words.
pub(super) fn sized(code: u8, words: &[u32]) -> Vec<u8> {
    let length = (words.len() * 4) as u8;
    [4, code, length, 0]
        .into_iter()
        .chain(words.iter().flat_map(|word| word.to_le_bytes()))
        .collect()
}

/// Returns a record that holds its value itself.
pub(super) fn short(code: u8, value: u16) -> Vec<u8> {
    let [low, high] = value.to_le_bytes();
    vec![3, code, low, high]
}

/// Returns a kernel for sm_90a with a pointer, an integer and 48 bytes of parameters that the
/// compiler added.
pub(super) fn sample() -> Synthetic {
    let own = [
        // Later parameters stand first, as the compiler writes them.
        sized(0x45, &[0, 0x0008_0001, 4]),
        sized(0x45, &[0, 0, 0x0400_0008]),
        sized(0x10, &[384, 1, 1]),
        short(0x19, 60),
        sized(0x0a, &[2, 0x003c_0210]),
    ];
    let mut host = vec![0; 20];
    host[18] = 62;
    Synthetic {
        number: 90,
        compat: vec![2, 9, 1, 0],
        functions: vec![("forward_entry", true), ("helper", false)],
        info: vec![(0x2f, 1, 24), (0x2f, 0, 168), (0x11, 0, 16), (0x12, 0, 32)],
        own: own.concat(),
        shared: 231_104,
        hosts: vec![host],
    }
}

impl Synthetic {
    /// Returns the bytes: file header, contents, section headers, one program header.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let kernel = self.functions[0].0;
        let mut names = vec![0];
        let mut symbols = vec![0; 24];
        for &(name, entry) in &self.functions {
            symbols.extend((names.len() as u32).to_le_bytes());
            symbols.extend([0x12, if entry { 0x10 } else { 0 }, 0, 0]);
            symbols.extend([0; 16]);
            names.extend(name.bytes().chain([0]));
        }
        let info = |&(code, function, value): &(u8, u32, u32)| sized(code, &[function + 1, value]);
        let mut sections = vec![
            (String::new(), 0, Vec::new(), 0),
            (".shstrtab".into(), 3, Vec::new(), 0),
            (".strtab".into(), 3, names, 0),
            (".symtab".into(), 2, symbols, 2),
            (".nv.compat".into(), 1, self.compat.clone(), 0),
            (".nv.info".into(), 1, self.info.iter().flat_map(info).collect(), 3),
            (format!(".nv.info.{kernel}"), 1, self.own.clone(), 3),
            (format!(".text.{kernel}"), 1, vec![0; 16], 3),
            (format!(".nv.shared.{kernel}"), 8, Vec::new(), 0),
        ];
        for (name, code) in [".nv.host", ".nv.merc.nv.host"].iter().zip(&self.hosts) {
            sections.push(((*name).into(), 1, code.clone(), 0));
        }
        assemble(self.number, self.shared, &sections)
    }
}

/// Returns a file of sections, each with name, kind, contents and link; `shared` is the size of
/// sections without contents.
fn assemble(number: u8, shared: u64, sections: &[(String, u32, Vec<u8>, u32)]) -> Vec<u8> {
    let names: Vec<u8> = sections.iter().flat_map(|(name, ..)| name.bytes().chain([0])).collect();
    let mut bytes = vec![0; 64];
    let mut headers = Vec::new();
    let mut name_at = 0;
    for (i, (name, kind, contents, link)) in sections.iter().enumerate() {
        let contents = if i == 1 { &names } else { contents };
        let size = if *kind == 8 { shared } else { contents.len() as u64 };
        headers.extend([name_at, *kind].into_iter().flat_map(u32::to_le_bytes));
        headers.extend([0, 0, bytes.len() as u64, size].into_iter().flat_map(u64::to_le_bytes));
        headers.extend(link.to_le_bytes());
        headers.extend([0; 20]);
        bytes.extend(contents);
        name_at += name.len() as u32 + 1;
    }
    let table = bytes.len() as u64;
    bytes.extend(headers);
    let segments = bytes.len() as u64;
    bytes.extend([0; 56]);
    bytes[..9].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1, 0x41, 8]);
    bytes[18] = 190;
    bytes[32..40].copy_from_slice(&segments.to_le_bytes());
    bytes[40..48].copy_from_slice(&table.to_le_bytes());
    bytes[48..52].copy_from_slice(&[4, number, 0, 6]);
    let counts = [56, 1, 64, sections.len() as u16, 1];
    bytes[54..64].copy_from_slice(&counts.map(u16::to_le_bytes).concat());
    bytes
}
