// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Converts OpenMetrics to Prometheus' older text format (0.0.4), for clients that do not request
//! OpenMetrics: promtool, old servers, and curl. In the exporter's output the two formats differ in
//! the names of counters and in two kinds of comments.

/// Converts metrics from OpenMetrics to Prometheus' older text format 0.0.4.
pub fn classic(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let counters: std::collections::HashSet<&str> = open_metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
        .collect();
    for line in open_metrics.lines() {
        let comment = line.strip_prefix("# ").and_then(|rest| {
            let mut words = rest.splitn(3, ' ');
            Some((words.next()?, words.next(), words.next()))
        });
        match comment {
            Some(("UNIT" | "EOF", ..)) => continue,
            // In OpenMetrics, the comment lines of a counter name it without the suffix _total. In
            // the older format, they name it as its samples do, with _total.
            Some((what, Some(name), Some(rest))) if counters.contains(name) => {
                text += &format!("# {what} {name}_total {rest}\n");
                continue;
            }
            _ => {}
        }
        text += line;
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classic_format_appends_total_to_counter_names() {
        let open = "# HELP a_bytes b c.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\na_bytes_total{x=\"# y\"} 1\n\
                    # HELP d e.\n# TYPE d gauge\nd 2\n# EOF\n";
        let text = "# HELP a_bytes_total b c.\n# TYPE a_bytes_total counter\na_bytes_total{x=\"# y\"} 1\n\
                    # HELP d e.\n# TYPE d gauge\nd 2\n";
        assert_eq!(classic(open), text);
    }
}
