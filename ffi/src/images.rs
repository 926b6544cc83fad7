//! The files of CUDA images, which lie in the library's folder. The library finds the folder by its
//! own path, and reads a file when it needs the file's first image.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use burst_attention_kernels::images::{FOLDER, Images, ImagesError, targets};
use burst_attention_kernels::instances::{Instance, Target};

/// Returns the image of an instance.
///
/// # Errors
/// If there is none. The next call searches again.
pub fn find(instance: &Instance) -> Result<&'static [u8], ImagesError> {
    static READ: Mutex<Option<HashMap<Target, &'static Images>>> = Mutex::new(None);
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    let read = read.get_or_insert_default();
    let images = match read.get(&instance.target) {
        Some(images) => images,
        None => {
            // The process keeps the file for good: one of a few megabytes for each kind of GPU.
            let images = Box::leak(Box::new(Images::read(&folder(), instance.target)?));
            *read.entry(instance.target).or_insert(images)
        }
    };
    images.get(instance)
}

/// Returns the targets that have images, and the reason for each file that the library refuses, in
/// words.
pub fn describe() -> String {
    describe_folder(&folder())
}

fn describe_folder(folder: &Path) -> String {
    let (mut usable, mut refused) = (Vec::new(), String::new());
    for target in targets(folder) {
        match Images::read(folder, target) {
            Ok(_) => usable.push(target.name()),
            Err(error) => refused += &format!("; {error}"),
        }
    }
    match usable.is_empty() {
        true => format!("none in {}{refused}", folder.display()),
        false => format!("for {} in {}{refused}", usable.join(", "), folder.display()),
    }
}

/// Returns the folder of the files.
fn folder() -> PathBuf {
    own_path().as_deref().and_then(Path::parent).unwrap_or(Path::new(".")).join(FOLDER)
}

/// Returns the path of the file that the dynamic linker loaded this code from.
fn own_path() -> Option<PathBuf> {
    // SAFETY: zero is a value of each field: numbers and pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `dladdr` takes any address, and `info` lives and can be written.
    let found = unsafe { libc::dladdr(own_path as *const c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the linker guarantees a C string that stays while the library is loaded.
    let path = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(path.to_bytes())))
}

#[cfg(test)]
mod tests {
    use std::env::consts::ARCH;

    use burst_attention_kernels::host::Host;
    use burst_attention_kernels::images::write;

    use super::*;

    #[test]
    fn looks_beside_the_file_that_holds_this_code() {
        let own = std::env::current_exe().unwrap().canonicalize().unwrap();
        assert_eq!(folder().canonicalize().ok(), None, "a test has no images");
        assert_eq!(own_path().unwrap().canonicalize().unwrap(), own);
        let instance = Instance::all().next().unwrap();
        let error = find(&instance).unwrap_err().to_string();
        let expected = own.with_file_name(FOLDER).join("sm_80.safetensors");
        assert!(error.contains(expected.to_str().unwrap()), "{error}");
        assert!(describe().starts_with("none in "), "{}", describe());
    }

    #[test]
    fn a_file_for_another_host_is_described_as_such() {
        let folder = std::env::temp_dir().join(format!("images-described-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (target, host) in [Target::Sm90, Target::Sm100].into_iter().zip(Host::ALL) {
            write(&folder, target, host, &[]).unwrap();
        }
        let said = describe_folder(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        let own = if ARCH == "x86_64" { "sm_90" } else { "sm_100" };
        assert!(said.starts_with(&format!("for {own} in {}; ", folder.display())), "{said}");
        assert!(said.contains("CUDA kernels for a host of "), "{said}");
    }
}
