//! Kernels, element types, targets and values as a program in another language writes them.

use serde::de::{Deserialize, Deserializer, Error as _};
use serde::ser::{Serialize, SerializeStruct, Serializer};

use super::Launch;
use crate::instances::{Element, Kernel, Target};
use crate::record::Value;

/// Writes and reads an enum as its variants' names.
macro_rules! by_name {
    ($($type:ident),*) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let name = String::deserialize(deserializer)?;
                let found = $type::ALL.into_iter().find(|item| item.name() == name);
                let unknown = || {
                    let names = $type::ALL.map($type::name).join(", ");
                    D::Error::custom(format!("expected one of {names}, got {name}"))
                };
                found.ok_or_else(unknown)
            }
        }
    )*};
}

by_name!(Kernel, Element, Target);

/// As `{"pointer": 4096}`, `{"i32": 7}` or `{"f32": 0.5}`.
impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Value::Pointer(value) => {
                serializer.serialize_newtype_variant("Value", 0, "pointer", value)
            }
            Value::I32(value) => serializer.serialize_newtype_variant("Value", 1, "i32", value),
            Value::F32(value) => serializer.serialize_newtype_variant("Value", 2, "f32", value),
        }
    }
}

/// With the image's name and that of the function in it, as the loader wants them.
impl Serialize for Launch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut launch = serializer.serialize_struct("Launch", 4)?;
        launch.serialize_field("image", &self.instance.to_string())?;
        launch.serialize_field("entry", &self.instance.entry())?;
        launch.serialize_field("grid", &self.grid)?;
        launch.serialize_field("values", &self.values)?;
        launch.end()
    }
}
