// SPDX-License-Identifier: Apache-2.0 OR MIT
//! TLS settings of the exporter, in a file with the format of Prometheus' exporters
//! (`--web.config.file`).
//!
//! The exporter reads the file once, so a change of it cannot switch TLS off while the exporter
//! runs. It reads the certificates and private keys that the file names for each connection, so a
//! renewed certificate applies at once. Out of scope: other functions of the format. If the file
//! configures one, the exporter refuses the file and names the key.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, SupportedProtocolVersion, version};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use yaml_rust2::{Yaml, YamlLoader};

/// Maximum number of bytes of the web configuration file.
const FILE_BYTES_MAX: usize = 64 << 10;

/// Versions of TLS that the exporter supports, newest first.
const VERSIONS: [&SupportedProtocolVersion; 2] = [&version::TLS13, &version::TLS12];

/// Top-level keys of the web configuration file that this exporter supports.
const KEYS: [&str; 1] = ["tls_server_config"];
/// Top-level keys of the web configuration file that this exporter does not support. The second
/// text of each pair tells the user what to do instead.
const OTHER_KEYS: [(&str, &str); 3] = [
    ("basic_auth_users", "use --token-file"),
    ("http_server_config", "the exporter speaks HTTP/1.1 only"),
    ("rate_limit", "the exporter serves 8 clients at once"),
];
/// Keys of `tls_server_config` that this exporter supports.
const TLS_KEYS: [&str; 5] = [
    "cert_file",
    "key_file",
    "client_auth_type",
    "client_ca_file",
    "min_version",
];
/// Keys of `tls_server_config` that this exporter does not support, although other exporters do.
/// The second text of each pair tells the user what to do instead.
const OTHER_TLS_KEYS: [(&str, &str); 8] = [
    ("cert", "use cert_file"),
    ("key", "use key_file"),
    ("client_ca", "use client_ca_file"),
    (
        "client_allowed_sans",
        "sign only allowed clients with the client_ca_file",
    ),
    ("max_version", "remove this key"),
    ("cipher_suites", "remove this key"),
    ("prefer_server_cipher_suites", "remove this key"),
    ("curve_preferences", "remove this key"),
];

/// TLS settings of the exporter.
#[derive(Debug, PartialEq, Eq)]
pub struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    /// File of the CA certificates. A client must have a certificate that one of them has signed.
    /// None if clients need no certificate.
    client_ca: Option<PathBuf>,
    /// Number of TLS versions that clients may use, counted from the beginning of [`VERSIONS`].
    versions: usize,
}

impl Tls {
    /// Reads the web configuration file. Returns None if it does not configure TLS.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is invalid. The error names the path and the
    /// key.
    pub fn read(path: &Path) -> Result<Option<Tls>, String> {
        let fault = |what: String| format!("--web.config.file {}: {what}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| fault(error.to_string()))?;
        if text.len() > FILE_BYTES_MAX {
            return Err(fault("it is too large".into()));
        }
        // Relative paths in the web configuration file start at the directory of that file.
        let directory = path.parent().unwrap_or(Path::new(""));
        let tls = Tls::parse(&text, directory).map_err(fault)?;
        if let Some(tls) = &tls {
            tls.server_config()?;
        }
        Ok(tls)
    }

    fn parse(text: &str, directory: &Path) -> Result<Option<Tls>, String> {
        let documents = YamlLoader::load_from_str(text).map_err(|error| error.to_string())?;
        let [document] = &documents[..] else {
            return match documents.is_empty() {
                true => Ok(None),
                false => Err("it has several documents".into()),
            };
        };
        check_keys(document, "", &KEYS, &OTHER_KEYS)?;
        let tls = &document["tls_server_config"];
        if tls.is_badvalue() {
            return Ok(None);
        }
        check_keys(tls, "tls_server_config.", &TLS_KEYS, &OTHER_TLS_KEYS)?;
        let word = |key: &str| match &tls[key] {
            Yaml::BadValue => Ok(None),
            Yaml::String(word) if !word.is_empty() => Ok(Some(word.as_str())),
            _ => Err(format!("tls_server_config.{key}: write a string")),
        };
        let file = |key: &str| word(key).map(|name| name.map(|name| directory.join(name)));
        let needed = |key: &str| {
            file(key)?.ok_or_else(|| format!("tls_server_config.{key} is missing: name a PEM file"))
        };
        let (certificate, key) = (needed("cert_file")?, needed("key_file")?);
        let client_ca = file("client_ca_file")?;
        match (word("client_auth_type")?, &client_ca) {
            (None | Some("NoClientCert"), None) => {}
            (Some("RequireAndVerifyClientCert"), Some(_)) => {}
            (Some("RequireAndVerifyClientCert"), None) => {
                return Err("tls_server_config.client_ca_file is missing: name a PEM file".into());
            }
            (None | Some("NoClientCert"), Some(_)) => {
                return Err("tls_server_config.client_ca_file needs client_auth_type: \
                            RequireAndVerifyClientCert"
                    .into());
            }
            (Some(other), _) => {
                return Err(format!(
                    "tls_server_config.client_auth_type: {other}: write NoClientCert or \
                     RequireAndVerifyClientCert"
                ));
            }
        }
        let versions = match word("min_version")? {
            None | Some("TLS12") => 2,
            Some("TLS13") => 1,
            Some(other) => {
                let what = "write TLS12 or TLS13";
                return Err(format!("tls_server_config.min_version: {other}: {what}"));
            }
        };
        Ok(Some(Tls {
            certificate,
            key,
            client_ca,
            versions,
        }))
    }

    /// Returns true if the exporter serves only clients with a valid certificate.
    pub fn verifies_clients(&self) -> bool {
        self.client_ca.is_some()
    }

    /// Reads the certificate and key files, and returns the TLS configuration for a connection.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or is invalid. The error names the file's path.
    pub fn server_config(&self) -> Result<Arc<ServerConfig>, String> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&VERSIONS[..self.versions])
            .map_err(|error| error.to_string())?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates(path)? {
                    let added = roots.add(certificate);
                    added.map_err(|error| format!("{}: {error}", path.display()))?;
                }
                let roots = Arc::new(roots);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
                let verifier = verifier.build();
                let wrong = |error| format!("{}: {error}", path.display());
                builder.with_client_cert_verifier(verifier.map_err(wrong)?)
            }
        };
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|error| {
            format!(
                "{}: the private key cannot be read: {error}",
                self.key.display()
            )
        })?;
        let config = builder.with_single_cert(certificates(&self.certificate)?, key);
        let config = config.map_err(|error| {
            let (key, certificate) = (self.key.display(), self.certificate.display());
            format!("{certificate} and {key}: {error}")
        })?;
        Ok(Arc::new(config))
    }
}

/// Reads the certificates in a PEM file. A file without a certificate is an error.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let at = path.display();
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err(format!("{at}: the file contains no certificate")),
        Err(error) => Err(format!("{at}: the certificate cannot be read: {error}")),
    }
}

/// Checks that a map of the web configuration file has only the keys `keys`. The error names the
/// first other key, with the prefix `of`. If the key is in `others`, the error also says what to
/// do.
fn check_keys(map: &Yaml, of: &str, keys: &[&str], others: &[(&str, &str)]) -> Result<(), String> {
    let Yaml::Hash(map) = map else {
        return match map {
            // The map is empty in the file, so it has no keys.
            Yaml::Null => Ok(()),
            _ => Err(format!(
                "{of}: write a map with these keys: {}",
                keys.join(", ")
            )),
        };
    };
    for key in map.keys() {
        let name = key.as_str().unwrap_or("?");
        if keys.contains(&name) {
            continue;
        }
        let other = others.iter().find(|(other, _)| *other == name);
        return Err(match other {
            Some((_, instead)) => format!("{of}{name} is not supported: {instead}"),
            None => format!("unknown key {of}{name}: the keys are {}", keys.join(", ")),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Option<Tls>, String> {
        Tls::parse(text, Path::new("/etc/x"))
    }

    #[test]
    fn the_prometheus_web_config_format_is_parsed() {
        for empty in ["", "# nothing\n", "{}\n", "---\n"] {
            assert_eq!(
                parse(empty),
                Ok(None),
                "the empty configuration {empty:?} enables TLS"
            );
        }
        let tls = Tls {
            certificate: "/etc/x/a.pem".into(),
            key: "/b.pem".into(),
            client_ca: None,
            versions: 2,
        };
        let text = "tls_server_config:\n  cert_file: a.pem\n  key_file: /b.pem\n";
        assert_eq!(parse(text), Ok(Some(tls)));
        let more = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: c.pem\n  \
                    min_version: TLS13\n";
        let tls = parse(&format!("{text}{more}"))
            .expect("the configuration was refused")
            .expect("the configuration has no TLS");
        assert!(tls.verifies_clients() && tls.versions == 1);
    }

    #[test]
    fn invalid_keys_and_values_are_named_in_errors() {
        let both = "tls_server_config: {cert_file: a, key_file: b";
        for (text, parts) in [
            (
                "tls_config: {}",
                &["tls_config", "the keys are tls_server_config"][..],
            ),
            (
                "basic_auth_users: {}",
                &["basic_auth_users is not supported", "--token-file"],
            ),
            (
                "tls_server_config: {cert_file: a}",
                &["key_file is missing"],
            ),
            (
                "tls_server_config: {cert_fil: a}",
                &["unknown key tls_server_config.cert_fil", "cert_file"],
            ),
            (
                "tls_server_config: {cert: a}",
                &["tls_server_config.cert is not", "cert_file"],
            ),
            ("tls_server_config: 3", &["write a map"]),
            ("- a", &["write a map"]),
            ("a: b: c", &["line 1"]),
            ("a: 1\n---\nb: 2", &["several documents"]),
            (
                &format!("{both}, min_version: TLS10}}"),
                &["TLS10", "TLS12"],
            ),
            (
                &format!("{both}, client_ca_file: c}}"),
                &["RequireAndVerifyClientCert"],
            ),
            (
                &format!("{both}, client_auth_type: RequestClientCert}}"),
                &["RequestClientCert: "],
            ),
            (
                &format!("{both}, client_auth_type: RequireAndVerifyClientCert}}"),
                &["client_ca_file is missing"],
            ),
            (
                "tls_server_config: {cert_file: 3, key_file: b}",
                &["cert_file: write a string"],
            ),
        ] {
            let Err(error) = parse(text) else {
                panic!("the invalid configuration {text:?} was accepted");
            };
            for part in parts {
                assert!(
                    error.contains(part),
                    "the error for {text} does not contain {part:?}: {error}"
                );
            }
        }
    }
}
