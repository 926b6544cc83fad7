//! Enums whose variants have names. Programs in other languages write the names.

/// Declares an enum with a name for each variant, which JSON has.
macro_rules! named {
    ($(#[$doc:meta])+ $type:ident, $article:literal {
        $($(#[$variant_doc:meta])+ $variant:ident = $name:literal,)+
    }) => {
        $(#[$doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $type {
            $($(#[$variant_doc])+ $variant,)+
        }

        impl $type {
            /// All variants.
            pub const ALL: [$type; [$($name),+].len()] = [$($type::$variant),+];

            /// Returns the name.
            pub const fn name(self) -> &'static str {
                match self {
                    $($type::$variant => $name,)+
                }
            }

            /// Returns the variant of a name.
            ///
            /// # Errors
            /// If no variant has the name; the message lists all names.
            pub fn of_name(name: &str) -> Result<$type, String> {
                let found = $type::ALL.into_iter().find(|variant| variant.name() == name);
                let known = $type::ALL.map($type::name).join(", ");
                found.ok_or_else(|| format!("expected {} of {known}, got {name}", $article))
            }
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let name = String::deserialize(deserializer)?;
                $type::of_name(&name).map_err(serde::de::Error::custom)
            }
        }
    };
}

pub(crate) use named;
