// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Draws the screen of `tmemctl top`: the pool at the top, a row for each VM, and details of the
//! selected VM at the bottom.

use super::model::{Model, Row, Sort, mean_us};
use crate::table::{percent, ratio, size};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Block, Borders, Cell, Clear, Gauge, Paragraph, Row as Cells, Sparkline, Table,
};
use tmem_control::statistics::{Scope, Statistic};
use tmem_control::{PoolStats, VmStats};

/// Height of the part of the screen that shows the pool, and of the part that shows the selected
/// VM, in lines.
const POOL_LINES: u16 = 7;
const DETAIL_LINES: u16 = 8;

/// Formats a rate per second in at most 5 characters up to 10 million, with k or M from 10,000 on.
/// The columns are 6 wide and have no space between them.
fn rate_text(value: f64) -> String {
    match value {
        ..9_999.5 => format!("{value:.0}"),
        ..99_950.0 => format!("{:.1}k", value / 1e3),
        ..999_500.0 => format!("{:.0}k", value / 1e3),
        _ => format!("{:.2}M", value / 1e6),
    }
}

fn micros_text(value: Option<f64>) -> String {
    value.map_or("-".into(), |us| match us {
        ..999.5 => format!("{us:.0} µs"),
        ..9_950.0 => format!("{:.1} ms", us / 1e3),
        ..999_500.0 => format!("{:.0} ms", us / 1e3),
        _ => format!("{:.0} s", us / 1e6),
    })
}

fn percent_text(value: Option<f64>) -> String {
    value.map_or("-".into(), |part| format!("{:.0} %", part * 100.0))
}

/// Draws the whole screen of `tmemctl top`.
pub fn draw(frame: &mut Frame<'_>, model: &Model) {
    let [head, pool, table, detail, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(POOL_LINES),
        Constraint::Min(3),
        Constraint::Length(DETAIL_LINES),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_head(frame, head, model);
    draw_pool(frame, pool, model);
    let rows = model.rows();
    draw_table(frame, table, model, &rows);
    draw_detail(frame, detail, rows.get(model.selected).copied());
    draw_foot(frame, foot, model);
    if model.help {
        draw_help(frame);
    }
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let Some(daemon) = &model.daemon else { return };
    let (minutes, seconds) = (daemon.uptime_seconds / 60, daemon.uptime_seconds % 60);
    let text = format!(
        "tmemd {}  up {}:{:02}:{seconds:02}  {} of {} VMs connected  {} workers  {} resident",
        daemon.version,
        minutes / 60,
        minutes % 60,
        daemon.vms_connected,
        daemon.vms,
        daemon.workers,
        size(daemon.resident_bytes)
    );
    frame.render_widget(Line::from(text).bold(), area);
}

/// Formats the percentages of the pool's pages in each form: new, pattern, shared and packed.
fn composition(pool: &PoolStats) -> Line<'static> {
    let stored = pool.pages - pool.nursery_pages - pool.same_filled_pages - pool.shared_pages;
    let all = pool.pages.max(1);
    let span = |what: &str, pages: i64, color| {
        let text = format!(
            "{what} {}  ",
            percent_text(Some(pages.max(0) as f64 / all as f64))
        );
        Span::styled(text, Style::new().fg(color))
    };
    Line::from(vec![
        Span::raw(format!("{} pages: ", pool.pages)),
        span("new", pool.nursery_pages, Color::Yellow),
        span("pattern", pool.same_filled_pages, Color::Cyan),
        span("shared", pool.shared_pages, Color::Green),
        span("packed", stored, Color::Blue),
    ])
}

fn draw_pool(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let (Some(pool), Some(daemon)) = (&model.pool, &model.daemon) else {
        return;
    };
    let block = Block::new().borders(Borders::TOP).title("pool");
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [bar, text] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(inner);
    let short = if pool.size_bytes < pool.configured_bytes {
        ", the host is short of memory"
    } else {
        ""
    };
    let label = format!(
        "{} of {} held{short}",
        size(pool.held_bytes),
        size(pool.size_bytes)
    );
    let filled = pool.held_bytes as f64 / pool.size_bytes.max(1) as f64;
    let gauge = Gauge::default()
        .gauge_style(Style::new().fg(Color::Blue))
        .ratio(filled.clamp(0.0, 1.0))
        .label(label);
    frame.render_widget(gauge, bar);
    let [lines, spark] =
        Layout::horizontal([Constraint::Min(60), Constraint::Length(16)]).areas(text);
    let compressed = ratio(pool.original_bytes, pool.compressed_bytes);
    // The memory that deduplication saves is computed from the sizes before recompression with
    // zstd. Otherwise the savings of zstd would count twice.
    let once_bytes = pool.payload_bytes + pool.zstd_saved_bytes;
    let dedup = ratio(pool.compressed_bytes, once_bytes);
    let zstd = ratio(once_bytes, pool.payload_bytes);
    let all = ratio(pool.original_bytes, pool.held_bytes);
    let paragraph = Paragraph::new(vec![
        composition(pool),
        Line::from(format!(
            "gain ×{all}: compression ×{compressed}, equal pages ×{dedup}, zstd ×{zstd}"
        )),
        Line::from(format!("host RAM saved {}", size(pool.saved_bytes))),
        Line::from(format!(
            "VMs: {} of {} resident, net saving {}",
            size(daemon.memory_resident_bytes),
            size(daemon.memory_bytes),
            size(daemon.memory_saved_bytes)
        )),
        Line::from(format!(
            "disk reads avoided {}/s, {} since the start",
            rate_text(model.history.back().map_or(0.0, |hits| *hits as f64)),
            size(pool.hits.saturating_mul(4096))
        )),
    ]);
    frame.render_widget(paragraph, lines);
    let history: Vec<u64> = model.history.iter().copied().collect();
    let [title, bars] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(spark);
    frame.render_widget(Line::from("reads avoided/s"), title);
    frame.render_widget(sparkline(&history, bars.width, Color::Green), bars);
}

/// Creates a small bar chart (sparkline) of the last `width` values.
fn sparkline(values: &[u64], width: u16, color: Color) -> Sparkline<'_> {
    let from = values.len().saturating_sub(width.into());
    Sparkline::default()
        .data(&values[from..])
        .style(Style::new().fg(color))
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, model: &Model, rows: &[&Row]) {
    let heads = [
        ("VM", Some(Sort::Name)),
        ("HIT", Some(Sort::Rate)),
        ("READS-", Some(Sort::Hits)),
        ("GET/s", Some(Sort::Get)),
        ("GET", None),
        ("PUT/s", Some(Sort::Put)),
        ("PUT", None),
        ("USED", Some(Sort::Used)),
        ("OF", None),
        ("GETS", None),
    ];
    let arrow = if model.reverse { "▲" } else { "▼" };
    let head = Cells::new(heads.map(|(head, sort)| match sort == Some(model.sort) {
        true => Cell::from(format!("{head}{arrow}")),
        false => Cell::from(head),
    }));
    // If the table has more rows than lines, it scrolls so that the selected row is visible.
    let lines = usize::from(area.height.saturating_sub(2)).max(1);
    let first = (model.selected + 1).saturating_sub(lines);
    let cells = rows
        .iter()
        .enumerate()
        .skip(first)
        .take(lines)
        .map(|(nth, row)| {
            let vm = &row.vm;
            let mark = match (vm.connected, vm.frozen) {
                (false, _) => "-",
                (_, true) => "*",
                _ => " ",
            };
            let bars: String = row
                .history
                .iter()
                .rev()
                .take(8)
                .rev()
                .map(|&value| bar_char(value, row))
                .collect();
            let style = match nth == model.selected {
                true => Style::new().add_modifier(Modifier::REVERSED),
                false => Style::new(),
            };
            Cells::new([
                format!("{mark}{}", vm.name),
                percent_text(row.hit_part),
                rate_text(row.hits),
                rate_text(row.gets),
                micros_text(row.get_us),
                rate_text(row.puts),
                micros_text(row.put_us),
                size(vm.charged_bytes),
                size(vm.entitled_bytes),
                bars,
            ])
            .style(style)
        });
    let widths = [
        Constraint::Min(12),
        Constraint::Length(6),
        Constraint::Length(7),
        Constraint::Length(6),
        Constraint::Length(7),
        Constraint::Length(6),
        Constraint::Length(7),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Length(8),
    ];
    let table = Table::new(cells, widths)
        .header(head.style(Style::new().add_modifier(Modifier::BOLD)))
        .column_spacing(0)
        .block(Block::new().borders(Borders::TOP));
    frame.render_widget(table, area);
}

/// Returns the character that shows `value` in a VM's sparkline (bar chart of one line). The
/// largest value in the history of that VM has full height.
fn bar_char(value: u64, row: &Row) -> char {
    const SIGNS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = row.history.iter().copied().max().unwrap_or(0);
    match most {
        0 => SIGNS[0],
        most => SIGNS[(value * 8).div_ceil(most).min(8) as usize],
    }
}

/// Formats the counters of a VM that are exported as one metric, such as the refused pages by
/// reason. Each counter is named by the value of its label.
fn parts(vm: &VmStats, metric: &str) -> String {
    let figures = serde_json::to_value(vm).unwrap_or_default();
    let part = |row: &Statistic| match row.metric() {
        (name, Some((_, labels))) if name == metric => {
            Some(format!("{} {}", labels.join("/"), figures[row.field]))
        }
        _ => None,
    };
    let parts: Vec<String> = Statistic::in_scope(Scope::Vm).filter_map(part).collect();
    parts.join(", ")
}

fn draw_detail(frame: &mut Frame<'_>, area: Rect, row: Option<&Row>) {
    let Some(row) = row else {
        let block = Block::new().borders(Borders::TOP);
        frame.render_widget(Paragraph::new("no VM").block(block), area);
        return;
    };
    let vm = &row.vm;
    let driver = vm
        .driver
        .as_ref()
        .map_or("has not reported".to_string(), |driver| {
            let histogram = driver.get_latency.as_ref();
            let waits = histogram.and_then(|waits| mean_us(waits, None));
            format!(
                "{} {}, kernel {}, mean get time {}",
                driver.version,
                driver.state,
                driver.kernel,
                micros_text(waits)
            )
        });
    let mut lines = vec![
        Line::from(format!(
            "{} pages of {}: new {}, pattern {}, shared {}",
            vm.pages,
            size(vm.original_bytes),
            vm.nursery_pages,
            vm.same_filled_pages,
            vm.shared_pages
        )),
        Line::from(format!(
            "memory {}, of which {} resident",
            size(vm.memory_bytes),
            vm.memory_resident_bytes.map_or("-".into(), size)
        )),
        Line::from(format!(
            "{} charged of {} entitled; disk reads avoided {}",
            size(vm.charged_bytes),
            size(vm.entitled_bytes),
            size(vm.disk_read_avoided_bytes)
        )),
        Line::from(format!(
            "since the start: {} gets, {} hits ({}), {} puts",
            vm.gets,
            vm.hits,
            percent(vm.hits, vm.gets),
            vm.puts
        )),
        Line::from(format!(
            "refused {}: {}",
            vm.puts_refused,
            parts(vm, "tmem_vm_put_refused_pages")
        )),
        Line::from(format!(
            "evicted {}: {}; flushed {}",
            vm.evictions,
            parts(vm, "tmem_vm_evicted_pages"),
            vm.flushed_pages
        )),
        Line::from(format!("driver: {driver}")),
    ];
    // Only a VM that uses retained pages has a line about them.
    if vm.retained_hits > 0 || vm.refs > 0 {
        let retained = format!(
            "retained {}: {} hits, {} refs, {} gone, {} evicted",
            vm.retained_pages, vm.retained_hits, vm.refs, vm.refs_gone, vm.evictions_retained
        );
        lines.insert(lines.len() - 1, Line::from(retained));
    }
    let block = Block::new().borders(Borders::TOP).title(vm.name.clone());
    let inner = block.inner(area);
    frame.render_widget(block, area);
    frame.render_widget(Paragraph::new(lines), inner);
}

fn draw_foot(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let line = match (&model.problem, model.typing) {
        (_, true) => Line::from(format!(
            "filter: {}_   Enter keeps the filter, Esc removes the filter",
            model.filter
        )),
        (Some(problem), _) => Line::from(problem.clone()).fg(Color::Red),
        (None, _) => {
            let filter = match model.filter.is_empty() {
                true => String::new(),
                false => format!("  filter: {}", model.filter),
            };
            let paused = if model.paused { "  paused" } else { "" };
            Line::from(format!(
                "q quit  ? help  / filter  r reverse  space pause{paused}{filter}"
            ))
        }
    };
    frame.render_widget(line, area);
}

fn draw_help(frame: &mut Frame<'_>) {
    let mut lines: Vec<Line<'_>> = Sort::ALL
        .iter()
        .map(|sort| Line::from(format!("{}      order by {}", sort.key(), sort.name())))
        .collect();
    lines.extend([
        Line::from("r      reverse the order"),
        Line::from("/      show only VMs whose names contain a text; Esc: all"),
        Line::from("↑ ↓    choose a VM, shown below in full (or k, j)"),
        Line::from("space  pause and resume"),
        Line::from("q      quit"),
        Line::from("-: not connected   *: frozen   READS-: disk reads avoided/s"),
    ]);
    let area = frame.area();
    let height = (lines.len() as u16 + 2).min(area.height);
    let [_, middle, _] = Layout::vertical([
        Constraint::Fill(1),
        Constraint::Length(height),
        Constraint::Fill(1),
    ])
    .areas(area);
    let [_, middle, _] = Layout::horizontal([
        Constraint::Fill(1),
        Constraint::Length(62.min(area.width)),
        Constraint::Fill(1),
    ])
    .areas(middle);
    frame.render_widget(Clear, middle);
    let block = Block::bordered().title("keys");
    frame.render_widget(Paragraph::new(lines).block(block), middle);
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::{driver, reply, vm};
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use std::time::{Duration, Instant};
    use tmem_control::{GetStats_Reply, Histogram};

    fn screen(model: &Model, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height))
            .expect("cannot create the test terminal");
        terminal
            .draw(|frame| draw(frame, model))
            .expect("cannot draw the view");
        let buffer = terminal.backend().buffer().clone();
        let rows = (0..height).map(|y| (0..width).map(move |x| (x, y)));
        rows.map(|row| row.map(|at| buffer[at].symbol()).collect::<String>())
            .collect()
    }

    /// Adds `count` requests with a mean time of `mean_us` to a histogram.
    fn requests(histogram: &mut Histogram, count: i64, mean_us: i64) {
        histogram.buckets[6] += count;
        histogram.sum_ns += count * mean_us * 1000;
    }

    /// PACKED_BYTES is the compressed size of each page in the figures of the test's VMs.
    /// CHARGE_BYTES is what the daemon charges for a page in addition to its compressed size.
    const PACKED_BYTES: i64 = 1900;
    const CHARGE_BYTES: i64 = 320;

    /// Computes those counters of a VM that other counters determine. The number of puts is the sum
    /// of the pages in the pool and the pages that were refused, returned, evicted or flushed.
    fn derive_counters(vm: &mut VmStats) {
        vm.original_bytes = vm.pages * 4096;
        vm.stored_pages = vm.pages - vm.nursery_pages - vm.same_filled_pages - vm.shared_pages;
        vm.compressed_bytes =
            vm.nursery_pages * 4096 + (vm.shared_pages + vm.stored_pages) * PACKED_BYTES;
        vm.charged_bytes = vm.compressed_bytes + vm.pages * CHARGE_BYTES;
        vm.saved_bytes = vm.original_bytes - vm.charged_bytes;
        vm.misses = vm.gets - vm.hits;
        vm.disk_read_avoided_bytes = vm.hits * 4096;
        vm.evictions = vm.evictions_limit + vm.evictions_pool + vm.evictions_shrink;
        vm.puts_refused = vm.refused_nursery + vm.refused_frozen;
        vm.puts = vm.pages + vm.puts_refused + vm.hits + vm.evictions + vm.flushed_pages;
    }

    /// Returns the figures that a daemon would report after some hours, with two VMs of one trust
    /// domain. The pool's figures are the sums of the VMs' figures.
    fn figures_of_two_vms() -> GetStats_Reply {
        let mut web = vm("web-1", 6_120_000, 4_773_600, 0);
        (web.pages, web.nursery_pages) = (163_840, 2_048);
        (web.same_filled_pages, web.shared_pages) = (6_000, 40_000);
        (web.refused_nursery, web.evictions_shrink) = (1_200, 5_120);
        web.flushed_pages = 66_240;
        let mut db = vm("db", 410_000, 246_000, 0);
        (db.pages, db.frozen, db.refused_frozen) = (65_536, true, 21_464);
        (db.same_filled_pages, db.shared_pages) = (3_000, 18_000);
        db.flushed_pages = 7_000;
        // The pool has 512 MiB. By their weights of 200 and 100, VM web-1 is entitled to two thirds
        // of it, and VM db to one third.
        (web.entitled_bytes, db.entitled_bytes) = ((512 << 20) * 2 / 3, (512 << 20) / 3);
        (web.memory_bytes, db.memory_bytes) = (4 << 30, 2 << 30);
        web.memory_resident_bytes = Some(1800 << 20);
        db.memory_resident_bytes = Some(1500 << 20);
        for (vm, get_us, put_us) in [(&mut web, 14, 55), (&mut db, 12, 6)] {
            derive_counters(vm);
            requests(&mut vm.get_latency, vm.gets / 8, get_us);
            requests(&mut vm.put_latency, vm.puts / 60, put_us);
            let mut driver = driver("on");
            driver.version = "1.2.3".into();
            driver.kernel = "6.12.117+deb12-cloud-amd64".into();
            let waits = driver
                .get_latency
                .as_mut()
                .expect("the driver reports no latencies of gets");
            requests(waits, vm.gets / 8, 31);
            vm.driver = Some(driver);
        }
        let mut figures = reply(vec![web, db]);
        let sum = |figure: fn(&VmStats) -> i64| figures.vms.iter().map(figure).sum::<i64>();
        let pool = &mut figures.pool;
        pool.pages = sum(|vm| vm.pages);
        pool.original_bytes = sum(|vm| vm.original_bytes);
        pool.compressed_bytes = sum(|vm| vm.compressed_bytes);
        pool.charged_bytes = sum(|vm| vm.charged_bytes);
        pool.nursery_pages = sum(|vm| vm.nursery_pages);
        pool.same_filled_pages = sum(|vm| vm.same_filled_pages);
        pool.shared_pages = sum(|vm| vm.shared_pages);
        pool.hits = sum(|vm| vm.hits);
        pool.zstd_saved_bytes = 24 << 20;
        pool.dedup_saved_bytes = pool.shared_pages * PACKED_BYTES;
        pool.payload_bytes = pool.compressed_bytes - pool.dedup_saved_bytes - pool.zstd_saved_bytes;
        pool.frames_bytes = pool.payload_bytes + (17 << 20);
        pool.metadata_bytes = 16 << 20;
        pool.held_bytes = pool.frames_bytes + pool.metadata_bytes;
        pool.saved_bytes = pool.original_bytes - pool.held_bytes;
        (pool.size_bytes, pool.configured_bytes) = (512 << 20, 512 << 20);
        let daemon = &mut figures.daemon;
        daemon.version = "1.2.3".into();
        (daemon.uptime_seconds, daemon.workers) = (3 * 3600 + 25 * 60 + 7, 4);
        (daemon.vms, daemon.vms_connected, daemon.vms_frozen) = (2, 2, 1);
        (daemon.memory_bytes, daemon.memory_resident_bytes) = (6 << 30, 3300 << 20);
        daemon.memory_saved_bytes =
            daemon.memory_bytes - daemon.memory_resident_bytes - pool.held_bytes;
        daemon.resident_bytes = pool.held_bytes + (9 << 20);
        figures
    }

    /// Returns a model that has polled the daemon at intervals of a second. The array `gets` has
    /// the gets of VM web-1 in each second. About as many pages are put as are hit.
    fn model() -> Model {
        let mut model = Model::new(Sort::Get, String::new());
        let begun = Instant::now();
        let gets = [1200, 1500, 1900, 2300, 2600, 2800, 2700, 2550, 2400];
        for second in 0..=gets.len() {
            let mut then = figures_of_two_vms();
            for later in &gets[second..] {
                let (web, db) = then.vms.split_at_mut(1);
                let (web, db) = (&mut web[0], &mut db[0]);
                web.gets -= later;
                web.hits -= later * 78 / 100;
                web.puts -= later * 80 / 100;
                requests(&mut web.get_latency, -later / 8, 14);
                requests(&mut web.put_latency, -later * 80 / 100 / 60, 55);
                (db.gets, db.hits, db.puts) = (db.gets - 40, db.hits - 24, db.puts - 60);
                requests(&mut db.get_latency, -5, 12);
                requests(&mut db.put_latency, -1, 6);
            }
            model.update(then, begun + Duration::from_secs(second as u64));
        }
        model
    }

    #[test]
    fn the_view_fits_into_80_by_24_cells() {
        let screen = screen(&model(), 80, 24);
        let text = screen.join("\n");
        assert!(
            screen[0].starts_with("tmemd 1.2.3  up 3:25:07  2 of 2 VMs connected  4 workers"),
            "the first line has the wrong text: {text}"
        );
        assert!(
            screen[2].contains("of 512 MiB held"),
            "the pool's line has the wrong text: {text}"
        );
        assert!(
            screen[3].contains("new 1 %  pattern 4 %  shared 25 %  packed 70 %"),
            "the line of page forms has the wrong text: {text}"
        );
        let web = screen
            .iter()
            .position(|line| line.starts_with(" web-1"))
            .expect("no row of VM web-1");
        let cells: Vec<&str> = screen[web].split_whitespace().collect();
        assert_eq!(
            cells[..13],
            [
                "web-1", "78", "%", "1872", "2400", "14", "µs", "1920", "55", "µs", "340", "MiB",
                "341"
            ],
            "the row of VM web-1 has the wrong cells: {text}"
        );
        assert!(
            cells.last().is_some_and(|bars| bars.contains("█")),
            "the VM with the most gets has no bar: {text}"
        );
        assert!(
            screen[web + 1].starts_with("*db"),
            "VM db, which is frozen, is not in the second row: {text}"
        );
        assert!(
            screen[23].starts_with("q quit"),
            "the key help is not in the last line: {text}"
        );
        assert!(
            text.contains("6120000 gets, 4773600 hits (78.0 %)"),
            "the details are not those of the first VM: {text}"
        );
        for end in [
            "shared 40000 ",
            "avoided 18.2 GiB ",
            "5010000 puts ",
            "31 µs ",
        ] {
            assert!(
                text.contains(end),
                "the end {end:?} of a line is cut off: {text}"
            );
        }
    }

    #[test]
    fn values_leave_a_space_to_the_next_column() {
        for value in (0..896).map(|step| 10f64.powf(f64::from(step) / 128.0)) {
            let rate = rate_text(value);
            assert!(rate.chars().count() < 6, "{rate} fills its column");
            let time = micros_text(Some(value));
            assert!(time.chars().count() < 7, "{time} fills its column");
            let bytes = size(value as i64);
            assert!(bytes.chars().count() < 9, "{bytes} fills its column");
        }
    }

    /// The screen shows the memory that zstd saves separately from the memory that deduplication
    /// saves. Otherwise an operator might merge trust domains without any benefit.
    #[test]
    fn each_kind_of_memory_gain_is_shown_separately() {
        let mut figures = figures_of_two_vms();
        let pool = &mut figures.pool;
        (pool.original_bytes, pool.compressed_bytes) = (400 << 20, 200 << 20);
        (pool.payload_bytes, pool.zstd_saved_bytes) = (160 << 20, 40 << 20);
        pool.held_bytes = 100 << 20;
        let gain = |figures: &GetStats_Reply| {
            let mut model = Model::new(Sort::Get, String::new());
            model.update(figures.clone(), Instant::now());
            screen(&model, 80, 24)[4].clone()
        };
        let shown = gain(&figures);
        assert!(
            shown.starts_with("gain ×4.00: compression ×2.00, equal pages ×1.00, zstd ×1.25 "),
            "the gain has the wrong text: {shown}"
        );
        (figures.pool.payload_bytes, figures.pool.zstd_saved_bytes) = (100 << 20, 0);
        let shown = gain(&figures);
        assert!(
            shown.contains("equal pages ×2.00, zstd ×1.00 "),
            "the gain has the wrong text: {shown}"
        );
    }

    /// Compares the screen that docs/tmemctl.md shows with the screen that the code draws. With
    /// TMEM_WRITE_DOCS=1, the test writes the drawn screen to that file.
    #[test]
    fn docs_tmemctl_md_contains_the_current_view_of_top() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/tmemctl.md");
        let text = std::fs::read_to_string(&path).expect("cannot read docs/tmemctl.md");
        let (before, rest) = text
            .split_once("<!-- top -->\n```\n")
            .expect("docs/tmemctl.md has no mark for the view");
        let (shown, after) = rest
            .split_once("```\n")
            .expect("docs/tmemctl.md has no end of the view");
        let lines = screen(&model(), 80, 24);
        let drawn: String = lines
            .iter()
            .map(|line| format!("{}\n", line.trim_end()))
            .collect();
        if std::env::var_os("TMEM_WRITE_DOCS").is_some() {
            let new = format!("{before}<!-- top -->\n```\n{drawn}```\n{after}");
            std::fs::write(&path, new).expect("cannot write the file");
            return;
        }
        assert_eq!(
            shown, drawn,
            "docs/tmemctl.md shows an outdated view: run this test with TMEM_WRITE_DOCS=1 to draw it"
        );
    }

    #[test]
    fn the_typed_filter_and_errors_are_shown() {
        let mut model = model();
        (model.filter, model.typing) = ("db".into(), true);
        let shown = screen(&model, 80, 24);
        assert!(
            shown[23].starts_with("filter: db_"),
            "the last line does not show the filter: {shown:#?}"
        );
        assert!(!shown.iter().any(|line| line.starts_with(" web-1")));
        model.typing = false;
        model.problem = Some("there is no control socket".into());
        assert!(screen(&model, 80, 24)[23].starts_with("there is no control socket"));
        model.help = true;
        let text = screen(&model, 80, 24).join("\n");
        assert!(
            text.contains("g      order by get") && text.contains("q      quit"),
            "the help lacks a key: {text}"
        );
    }

    #[test]
    fn the_view_scrolls_and_fits_every_terminal_size() {
        let mut model = Model::new(Sort::Name, String::new());
        let vms = (0..100)
            .map(|nth| vm(&format!("vm-{nth:03}"), 0, 0, 0))
            .collect();
        model.update(reply(vms), Instant::now());
        model.selected = 70;
        let text = screen(&model, 80, 24).join("\n");
        assert!(
            text.contains(" vm-070") && !text.contains(" vm-000"),
            "the table did not scroll to the selected VM: {text}"
        );
        for (width, height) in [(1, 1), (20, 5), (80, 10), (300, 100)] {
            model.help = width > 100;
            screen(&model, width, height);
        }
    }
}
