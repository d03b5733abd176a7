// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A complete daemon that runs in the process of a test.

use std::path::{Path, PathBuf};
use tempfile::TempDir;
use tmem_control::VarlinkClient;
use tmemd::{Config, Daemon};

/// A daemon with the configuration of [`Config::for_test`]. Dropping this value stops the daemon
/// and removes its directory.
pub struct TestDaemon {
    daemon: Option<Daemon>,
    config: Config,
    folder: TempDir,
}

impl TestDaemon {
    /// Starts a daemon that serves `vms`, each given as `NAME[,KEY=VALUE...]`.
    pub fn start(vms: &[&str]) -> TestDaemon {
        TestDaemon::start_with(vms, |_| ())
    }

    /// Starts a daemon that serves `vms`. `change` may change the daemon's configuration before the
    /// start.
    pub fn start_with(vms: &[&str], change: impl FnOnce(&mut Config)) -> TestDaemon {
        let folder = tempfile::tempdir().expect("cannot create a temporary directory");
        let mut config = Config::for_test(folder.path(), vms);
        change(&mut config);
        let mut daemon = TestDaemon {
            daemon: None,
            config,
            folder,
        };
        daemon.restart();
        daemon
    }

    /// Stops the daemon, if it runs, and starts it again with the same configuration.
    pub fn restart(&mut self) {
        self.stop();
        self.daemon = Some(Daemon::start(self.config.clone()).expect("cannot start the daemon"));
    }

    /// Stops the daemon. Its directory remains until this value is dropped.
    pub fn stop(&mut self) {
        self.daemon = None;
    }

    /// Returns the daemon's configuration. If a caller changes it, the next [`Self::restart`]
    /// applies the change.
    pub fn config(&mut self) -> &mut Config {
        &mut self.config
    }

    /// Returns the path of the daemon's directory.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the path of a file in the daemon's directory, such as `control`, `read-only` and
    /// `NAME.sock`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    /// Connects to the daemon's control socket.
    pub fn client(&self) -> VarlinkClient {
        tmem_control::connect(&self.path("control"))
            .expect("cannot connect to the daemon's control socket")
    }
}
