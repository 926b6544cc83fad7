//! Files of images: one for each target, in the format of safetensors.
//!
//! `burst-attention-compiler` writes these files and the library reads them at run time, so neither
//! needs the other at build time. A file says which launch records and which host its images were
//! compiled for. A library with other records, or for another host, refuses the file.

use std::collections::HashMap;
use std::env::consts::ARCH;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::host::Host;
use crate::instances::{Instance, Target};

/// Name of the folder with the files, which is next to the library.
pub const FOLDER: &str = "images";

/// The key of the launch records in a file's metadata.
const INTERFACE: &str = "interface";

/// The key of the host in a file's metadata.
const HOST: &str = "host";

/// The reason why there is no image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImagesError {
    /// The file cannot be read.
    #[error(
        "the CUDA kernels for {target} can't be read from {path}: {reason}; the wheel has them, \
         and in a source tree `make images` builds them"
    )]
    Unreadable {
        /// The target's name.
        target: &'static str,
        /// The file.
        path: String,
        /// The message of the system or of the format's reader.
        reason: String,
    },
    /// The file belongs to another version of the library.
    #[error(
        "{path} holds CUDA kernels of another version than this library: install one wheel, or in \
         a source tree run `make build images`"
    )]
    Foreign {
        /// The file.
        path: String,
    },
    /// The file was compiled for another host than this one.
    #[error(
        "{path} holds CUDA kernels for a host of {came}, but this host is of {ARCH}: install the \
         wheel for {ARCH}, or in a source tree run `make images` on this host"
    )]
    OtherHost {
        /// The file.
        path: String,
        /// The host that the file names.
        came: String,
    },
    /// The file lacks an image.
    #[error("{path} has no kernel {instance}: in a source tree run `make images`")]
    Absent {
        /// The file.
        path: String,
        /// The image.
        instance: String,
    },
}

/// The images of one target.
#[derive(Debug)]
pub struct Images {
    path: PathBuf,
    bytes: Vec<u8>,
    places: HashMap<String, Range<usize>>,
}

impl Images {
    /// Returns the images in the file of `target` in `folder`.
    ///
    /// # Errors
    /// If the file cannot be read, or is for other launch records than this crate's or for another
    /// host.
    pub fn read(folder: &Path, target: Target) -> Result<Images, ImagesError> {
        let path = file(folder, target);
        let unreadable = |reason: String| ImagesError::Unreadable {
            target: target.name(),
            path: path.display().to_string(),
            reason,
        };
        let bytes = fs::read(&path).map_err(|error| unreadable(error.to_string()))?;
        let header = SafeTensors::read_metadata(&bytes);
        let (length, header) = header.map_err(|error| unreadable(error.to_string()))?;
        let said = |what| header.metadata().as_ref().and_then(|found| found.get(what));
        let interface = said(INTERFACE).filter(|found| **found == interface(target));
        let (Some(_), Some(host)) = (interface, said(HOST)) else {
            return Err(ImagesError::Foreign { path: path.display().to_string() });
        };
        if host != ARCH {
            let (path, came) = (path.display().to_string(), host.clone());
            return Err(ImagesError::OtherHost { path, came });
        }
        // A file begins with the header's length, in eight bytes, and the header.
        let start = 8 + length;
        let places = header.tensors().into_iter().map(|(name, info)| {
            let (from, to) = info.data_offsets;
            (name, start + from..start + to)
        });
        let places = places.collect();
        Ok(Images { path, bytes, places })
    }

    /// Returns the image of an instance.
    ///
    /// # Errors
    /// If the file lacks the image.
    pub fn get(&self, instance: &Instance) -> Result<&[u8], ImagesError> {
        let name = instance.to_string();
        match self.places.get(&name) {
            Some(place) => Ok(&self.bytes[place.clone()]),
            None => {
                Err(ImagesError::Absent { path: self.path.display().to_string(), instance: name })
            }
        }
    }

    /// Returns the number of images.
    pub fn count(&self) -> usize {
        self.places.len()
    }
}

/// Returns the file of a target's images.
pub fn file(folder: &Path, target: Target) -> PathBuf {
    folder.join(format!("{}.safetensors", target.name()))
}

/// Returns the targets that `folder` has a file for.
pub fn targets(folder: &Path) -> Vec<Target> {
    Target::ALL.into_iter().filter(|&target| file(folder, target).exists()).collect()
}

/// Writes a target's images, which hold code for `host`, into the target's file in `folder`. A
/// failure leaves an earlier file as it was.
///
/// # Errors
/// If the file cannot be written.
pub fn write(
    folder: &Path,
    target: Target,
    host: Host,
    images: &[(Instance, Vec<u8>)],
) -> Result<(), safetensors::SafeTensorError> {
    let views = images.iter().map(|(instance, cubin)| {
        let view = TensorView::new(Dtype::U8, vec![cubin.len()], cubin)?;
        Ok((instance.to_string(), view))
    });
    let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    let metadata = [(INTERFACE, interface(target)), (HOST, host.name().to_owned())];
    let metadata = metadata.map(|(name, value)| (name.to_owned(), value));
    let path = file(folder, target);
    let new = path.with_extension("new");
    fs::write(&new, safetensors::serialize(views, Some(HashMap::from(metadata)))?)?;
    Ok(fs::rename(&new, &path)?)
}

/// Returns a text of each image's tile and arguments. The text must be the same where images are
/// compiled and where they are launched.
fn interface(target: Target) -> String {
    let mut text = format!("{}\n", env!("CARGO_PKG_VERSION"));
    for instance in Instance::of_target(target) {
        let arguments: Vec<String> = instance
            .kernel
            .arguments()
            .iter()
            .map(|argument| format!("{} {:?} {}", argument.name, argument.kind, argument.divisor))
            .collect();
        text += &format!("{instance} {:?}: {}\n", instance.tile(), arguments.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::env;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = env::temp_dir().join(format!("images-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn images_come_back_as_they_were_written() {
        let folder = folder("written");
        let all: Vec<Instance> = Instance::of_target(Target::Sm90).collect();
        let images: Vec<_> = all[1..].iter().map(|i| (*i, i.to_string().into_bytes())).collect();
        let own = Host::of_name(ARCH).unwrap();
        write(&folder, Target::Sm90, own, &images).unwrap();
        assert_eq!(targets(&folder), [Target::Sm90]);
        let read = Images::read(&folder, Target::Sm90).unwrap();
        assert_eq!(read.count(), images.len());
        for (instance, cubin) in &images {
            assert_eq!(read.get(instance).unwrap(), cubin);
        }
        let error = read.get(&all[0]).unwrap_err().to_string();
        assert!(error.contains(&format!("no kernel {}", all[0])), "{error}");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_that_is_missing_broken_or_for_another_library_is_refused() {
        let folder = folder("refused");
        let read = |target| Images::read(&folder, target).unwrap_err().to_string();
        let missing = read(Target::Sm80);
        assert!(missing.contains("sm_80.safetensors") && missing.contains("make images"));
        fs::write(file(&folder, Target::Sm80), b"not the format").unwrap();
        assert!(read(Target::Sm80).contains("can't be read"));
        let other = Host::ALL.into_iter().find(|host| host.name() != ARCH).unwrap();
        write(&folder, Target::Sm90, other, &[]).unwrap();
        let words = format!("for a host of {}, but this host is of {ARCH}: ", other.name());
        assert!(read(Target::Sm90).contains(&words), "{}", read(Target::Sm90));
        fs::copy(file(&folder, Target::Sm90), file(&folder, Target::Sm100)).unwrap();
        assert!(read(Target::Sm100).contains("of another version"));
        fs::remove_dir_all(folder).unwrap();
    }
}
