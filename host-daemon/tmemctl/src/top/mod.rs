// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tmemctl top`: a live view of the pool and its VMs, designed for 80 × 24 characters.
//!
//! | file | contents |
//! | --- | --- |
//! | `model.rs` | computes the displayed data: rates between two polls, order, filter, history |
//! | `view.rs` | draws the data on the screen, and does not call the daemon |
//! | `mod.rs` | polls the daemon, reads keys |
//!
//! `top` works on the read-only socket and changes nothing.

mod model;
mod view;

#[cfg(test)]
pub use model::tests;

use crate::client::stats;
use crate::exit::{Code, Failure, exit_now};
use crate::reach::{Reach, timeout_failure, within_timeout};
use clap::Args;
use model::{Model, Sort};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};
use tmem_control as api;

/// Longest time that the main loop of `top` waits for a key. Then the loop checks for signals and
/// for an answer of the daemon. The time is so short that a user notices no delay.
const KEY_WAIT: Duration = Duration::from_millis(50);

/// Options of `top`.
#[derive(Args, Clone)]
pub struct TopArguments {
    /// Seconds between two polls
    #[arg(long, short, value_name = "SECONDS", default_value_t = 1,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    delay: u64,
    /// Order of VMs: name, hits, rate, put, get, used or pages
    #[arg(long, value_name = "KEY", default_value = "get")]
    sort: Sort,
    /// Show only VMs whose names contain this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
}

/// Next action of the main loop of `top` after it has handled a key.
#[derive(Debug, PartialEq, Eq)]
enum Action {
    Nothing,
    Quit,
}

/// Changes the model as the pressed key demands.
fn handle_key(model: &mut Model, code: KeyCode, control: bool) -> Action {
    if control && code == KeyCode::Char('c') {
        return Action::Quit;
    }
    if model.typing {
        match code {
            KeyCode::Enter => model.typing = false,
            KeyCode::Esc => {
                model.typing = false;
                model.filter.clear();
            }
            KeyCode::Backspace => {
                model.filter.pop();
            }
            KeyCode::Char(c) => model.filter.push(c),
            _ => {}
        }
        model.stay_inside();
        return Action::Nothing;
    }
    match code {
        KeyCode::Char('q') => return Action::Quit,
        KeyCode::Char('/') => model.typing = true,
        KeyCode::Char('?' | 'h') => model.help = !model.help,
        KeyCode::Char('r') => model.reverse = !model.reverse,
        KeyCode::Char(' ') => model.paused = !model.paused,
        KeyCode::Esc => {
            model.help = false;
            model.filter.clear();
        }
        KeyCode::Down | KeyCode::Char('j') => model.selected += 1,
        KeyCode::Up | KeyCode::Char('k') => model.selected = model.selected.saturating_sub(1),
        KeyCode::Char(c) => {
            if let Some(sort) = Sort::ALL.into_iter().find(|sort| sort.key() == c) {
                model.sort = sort;
            }
        }
        _ => {}
    }
    model.stay_inside();
    Action::Nothing
}

/// Polls the daemon on a thread of its own, so that keys work while the daemon hangs. At most one
/// poll is under way.
struct Polls {
    reach: Reach,
    /// Time at which the current poll began, and the channel that receives its result; None if no
    /// poll is under way.
    under_way: Option<(Instant, Receiver<Result<api::GetStats_Reply, Failure>>)>,
}

impl Polls {
    fn start_poll(&mut self) {
        let (sender, receiver) = mpsc::channel();
        let reach = self.reach.clone();
        std::thread::spawn(move || {
            // Sending fails if the user has ended `top`, because the receiver no longer exists. The
            // result is not needed then.
            let _ = sender.send(stats(&reach, None));
        });
        self.under_way = Some((Instant::now(), receiver));
    }

    /// Returns the result of the poll if the daemon has answered, or a failure if the poll has
    /// exceeded the time limit. Returns None otherwise. A poll that exceeds the limit continues.
    fn finish_poll(&mut self) -> Option<Result<api::GetStats_Reply, Failure>> {
        let (since, receiver) = self.under_way.as_ref()?;
        match receiver.try_recv() {
            Ok(seen) => {
                self.under_way = None;
                Some(seen)
            }
            Err(_) => (since.elapsed() >= Duration::from_secs(self.reach.timeout))
                .then(|| Err(timeout_failure(&self.reach.daemon(), &self.reach))),
        }
    }
}

/// Shows the screen of `tmemctl top` until a key or a signal ends it.
pub fn run(reach: &Reach, arguments: &TopArguments) -> Result<(), Failure> {
    if reach.json {
        let what = "top does not support --json: use tmemctl stats --watch --json";
        return Err(Failure(what.into(), Code::Usage));
    }
    let mut model = Model::new(arguments.sort, arguments.filter.clone());
    // The first poll of the daemon precedes any change of the screen, so that the user can read an
    // error message.
    let first = within_timeout(&reach.daemon(), reach, |reach| stats(reach, None));
    model.update(first?, Instant::now());
    if !std::io::stdout().is_terminal() {
        let what = "top needs a terminal: use tmemctl stats --watch";
        return Err(Failure(what.into(), Code::Usage));
    }
    let failed = |error: std::io::Error| Failure(format!("the terminal: {error}"), Code::Failed);
    let told_to_end = end_by_signals().map_err(failed)?;
    let period = Duration::from_secs(arguments.delay);
    let reach = reach.clone();
    let mut polls = Polls {
        reach,
        under_way: None,
    };
    // ratatui restores the terminal also if the process panics.
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let mut next = Instant::now() + period.min(Duration::from_millis(500));
    let done = loop {
        if told_to_end.load(Ordering::Relaxed) {
            break Ok(());
        }
        if let Err(error) = terminal.draw(|frame| view::draw(frame, &model)) {
            break Err(failed(error));
        }
        match event::poll(KEY_WAIT) {
            Err(error) => break Err(failed(error)),
            Ok(true) => match event::read() {
                Err(error) => break Err(failed(error)),
                Ok(Event::Key(pressed)) if pressed.kind == KeyEventKind::Press => {
                    let control = pressed.modifiers.contains(KeyModifiers::CONTROL);
                    if handle_key(&mut model, pressed.code, control) == Action::Quit {
                        break Ok(());
                    }
                }
                Ok(_) => {}
            },
            Ok(false) => {}
        }
        match polls.finish_poll() {
            Some(Ok(reply)) => model.update(reply, Instant::now()),
            // After a failed poll, the screen still shows the figures of the last successful one.
            // Polling goes on, because the daemon may answer again.
            Some(Err(Failure(why, _))) => model.problem = Some(why),
            None => {}
        }
        if polls.under_way.is_none() && !model.paused && Instant::now() >= next {
            next = Instant::now() + period;
            polls.start_poll();
        }
    };
    // Restoring fails if the terminal no longer exists, so the error is ignored.
    let _ = ratatui::try_restore();
    done
}

/// Returns a flag that SIGTERM, SIGHUP and SIGINT set, so that the main loop ends. If the main loop
/// does not end within 200 ms, the signal thread ends the process. This happens if the terminal no
/// longer exists, because crossterm then reads from it forever.
fn end_by_signals() -> std::io::Result<Arc<AtomicBool>> {
    let signalled = Arc::new(AtomicBool::new(false));
    let (flag, mut signals) = (signalled.clone(), Signals::new([SIGTERM, SIGHUP, SIGINT])?);
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            flag.store(true, Ordering::Relaxed);
            std::thread::sleep(4 * KEY_WAIT);
            let _ = ratatui::try_restore();
            exit_now(0);
        }
    });
    Ok(signalled)
}

#[cfg(test)]
mod key_tests {
    use super::*;

    #[test]
    fn each_key_has_the_effect_that_the_help_describes() {
        let mut model = Model::new(Sort::Get, String::new());
        let mut press = |code| handle_key(&mut model, code, false);
        assert_eq!(press(KeyCode::Char('n')), Action::Nothing);
        assert_eq!(press(KeyCode::Char('/')), Action::Nothing);
        // While the user types a filter, a key such as `q` is a letter of the filter and no
        // command.
        for code in [KeyCode::Char('q'), KeyCode::Char('x'), KeyCode::Backspace] {
            assert_eq!(press(code), Action::Nothing);
        }
        assert_eq!(press(KeyCode::Enter), Action::Nothing);
        press(KeyCode::Char('r'));
        press(KeyCode::Char(' '));
        press(KeyCode::Down);
        assert_eq!(press(KeyCode::Char('q')), Action::Quit);
        assert_eq!(
            handle_key(&mut model, KeyCode::Char('c'), true),
            Action::Quit
        );
        assert_eq!((model.sort, &*model.filter), (Sort::Name, "q"));
        assert!(model.reverse && model.paused && !model.typing);
        assert_eq!(model.selected, 0, "the selection moved below the last VM");
        handle_key(&mut model, KeyCode::Esc, false);
        assert_eq!(model.filter, "");
    }
}
