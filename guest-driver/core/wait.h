/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Waits until a point in time. The kernel's wait_event_hrtimeout() adds the timer slack of the
 * current task (current->timer_slack_ns) to its timeout. Any task may set its slack to seconds, so
 * the driver does not use that macro.
 */
#ifndef _TMEM_WAIT_H
#define _TMEM_WAIT_H

#include <linux/hrtimer.h>
#include <linux/ktime.h>
#include <linux/wait.h>

/*
 * Sleeps, without being interruptible, until @condition is true or the clock of ktime_get_ns()
 * reaches @end_ns. Evaluates @condition like wait_event(), and once more after the end. Returns
 * whether @condition became true.
 */
#define tmem_wait_event_until(wq_head, condition, end_ns)				\
({											\
	ktime_t __end = ns_to_ktime(end_ns);						\
	bool __over = false, __met;							\
											\
	might_sleep();									\
	___wait_event(wq_head, (__met = !!(condition)) || __over, TASK_UNINTERRUPTIBLE,	\
		      0, 0, __over = !schedule_hrtimeout_range(&__end, 0, HRTIMER_MODE_ABS)); \
	__met;										\
})

#endif /* _TMEM_WAIT_H */
