// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Parses sizes such as `2GiB` in command lines and configuration files.

/// Parses a whole number of bytes with an optional unit B, KiB, MiB, GiB or TiB.
///
/// # Errors
/// Returns a sentence that quotes `text` if it is not a size.
pub fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let error = |what: &str| {
        format!(
            "{text:?} is not a size: {what}; write a whole number and B, KiB, MiB, GiB or TiB, \
             as in 512MiB"
        )
    };
    let shift = match &text[digits.len()..] {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        unit => return Err(error(&format!("{unit:?} is not a unit"))),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(error("the number is missing or not a whole number"));
    }
    let number: u64 = digits
        .parse()
        .map_err(|_| error("the number is too large"))?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| error("the number is too large"))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn sizes_are_parsed_with_their_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("7B", 7),
            ("1KiB", 1024),
            ("256MiB", 256 << 20),
            ("3GiB", 3 << 30),
            ("2TiB", 2 << 40),
        ] {
            assert_eq!(
                parse(text),
                Ok(bytes),
                "{text:?} was parsed as the wrong size"
            );
        }
        for text in [
            "",
            "MiB",
            "-1",
            "1.5GiB",
            "1 GiB",
            "1GB",
            "1G",
            "99999999TiB",
            "0x10",
            "1é",
        ] {
            let Err(error) = parse(text) else {
                panic!("the invalid size {text:?} was accepted");
            };
            assert!(
                error.contains(&format!("{text:?}")) && error.contains("512MiB"),
                "the error does not name the text and an example: {error}"
            );
        }
    }
}
