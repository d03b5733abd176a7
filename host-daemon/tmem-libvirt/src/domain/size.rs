// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes as libvirt writes them in XML: a number and an attribute `unit`, which defaults to KiB.

/// Returns the number of bytes of a unit, or None if libvirt does not know the unit. As in libvirt,
/// case does not matter, `K` is `KiB`, and `KB` is 1,000 bytes.
fn unit_bytes(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_lowercase();
    if matches!(unit.as_str(), "b" | "byte" | "bytes") {
        return Some(1);
    }
    let (letter, rest) = unit.split_at_checked(1)?;
    let power = "kmgtpe".find(letter)? as u32 + 1;
    match rest {
        "" | "ib" => Some(1024_u64.pow(power)),
        "b" => Some(1000_u64.pow(power)),
        _ => None,
    }
}

/// Returns the size in bytes of `number` units.
pub(crate) fn scale(number: &str, unit: &str) -> Result<u64, String> {
    let bytes = unit_bytes(unit).ok_or_else(|| {
        format!("{unit:?} is not a unit of libvirt: write bytes, KiB, MiB, GiB or TiB")
    })?;
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("{number:?} is not a whole number"));
    }
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(bytes))
        .filter(|bytes| i64::try_from(*bytes).is_ok())
        .ok_or_else(|| format!("{number} {unit} is too large"))
}

/// Parses a size of the command line, such as `2GiB`. The unit is mandatory except for 0. A number
/// without a unit would be ambiguous: virsh reads it as KiB, and the daemon reads it as bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &text[number.len()..];
    let fault = |what: String| format!("{text:?} is not a size: {what}");
    match (number.trim_end(), unit) {
        ("0", "") => Ok(0),
        (_, "") => Err(fault("the unit is missing, as in 512MiB or 2GiB".into())),
        (number, unit) => scale(number, unit).map_err(fault),
    }
}

/// Returns a size as libvirt writes it: a number and its unit. The unit is KiB, or bytes if the
/// size is not a multiple of 1 KiB.
pub fn write_size(bytes: u64) -> (u64, &'static str) {
    if bytes.is_multiple_of(1024) {
        (bytes / 1024, "KiB")
    } else {
        (bytes, "bytes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_units_have_the_values_that_libvirt_defines() {
        for (unit, bytes) in [
            ("b", 1),
            ("bytes", 1),
            ("KB", 1000),
            ("k", 1024),
            ("KiB", 1024),
            ("MB", 1_000_000),
            ("M", 1 << 20),
            ("mib", 1 << 20),
            ("GiB", 1 << 30),
            ("TiB", 1 << 40),
        ] {
            assert_eq!(
                scale("3", unit),
                Ok(3 * bytes),
                "a number with the unit {unit:?} has the wrong number of bytes"
            );
        }
        for unit in ["", "KiBs", "bit", "XiB", "Ki", "é", "i"] {
            assert!(
                scale("3", unit).is_err(),
                "the invalid unit {unit:?} was accepted"
            );
        }
    }

    #[test]
    fn command_line_sizes_need_a_unit_and_a_whole_number() {
        assert_eq!(parse_size("2GiB"), Ok(2 << 30));
        assert_eq!(parse_size("512 MiB"), Ok(512 << 20));
        assert_eq!(parse_size("0"), Ok(0));
        for text in ["", "2", "GiB", "-1GiB", "1.5GiB", "2GiBi", "9999999TiB"] {
            let Err(error) = parse_size(text) else {
                panic!("the invalid size {text:?} was accepted");
            };
            assert!(
                error.contains(&format!("{text:?}")),
                "the error does not quote the invalid size: {error}"
            );
        }
    }

    #[test]
    fn sizes_are_written_in_kib_or_bytes_without_rounding() {
        assert_eq!(write_size(2 << 30), (2 << 20, "KiB"));
        assert_eq!(write_size(1025), (1025, "bytes"));
    }
}
