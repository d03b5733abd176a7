// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmemctl: command line of the daemon's control socket.

fn main() {
    tmemctl::main();
}
