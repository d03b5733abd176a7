// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of tmem-exporter with a daemon and simulated guests.

mod common;
mod cost;
mod prometheus;
mod scrape;
mod tls;
