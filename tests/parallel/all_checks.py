"""All checks of a group of processes, by its size."""

import composition_checks
import equality_checks

CHECKS = {
    2: equality_checks.CHECKS | composition_checks.CHECKS_ON_2,
    4: equality_checks.CHECKS | composition_checks.CHECKS_ON_4,
}
