"""A headless Chromium for tests of pages: it makes no network requests and is always ended.

The fixtures `browser` and `browser_without_scripts` of tests/conftest.py have module scope.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM_NAMES = ('chromium', 'chromium-browser', 'google-chrome')
SECONDS = 120  # on a busy machine
FLAGS = (
    '--headless=new',
    *('--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--hide-scrollbars'),
    *('--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'),
    *('--disable-quic', '--disable-default-apps', '--disable-extensions'),
)

T = TypeVar('T')


class Browser:
    """A browser with one page. Scripts run unless it was started without them."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file in a window whose viewport is *width* by *height*."""
        size = {'width': width, 'height': height, 'deviceScaleFactor': 1, 'mobile': False}
        self.driver.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', size)
        scheme = {'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}
        self.driver.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': [scheme]})
        self.driver.get_log('browser')  # discards messages of an earlier page
        self.driver.get(page.as_uri())

    def run(self, script: str, *args: object) -> object:
        """Runs JavaScript in the page; `return` returns a value."""
        return self.driver.execute_script(script, *args)

    def until(self, condition: Callable[[], T]) -> T:
        """Waits for a limited time until the condition holds, and returns its value."""
        wait = WebDriverWait(self.driver, SECONDS, poll_frequency=0.02)
        return wait.until(lambda _: condition())

    def complaints(self) -> list[str]:
        """Returns the console messages of any level since the page was opened."""
        return [f'{entry["level"]}: {entry["message"]}' for entry in self.driver.get_log('browser')]

    def overflow(self) -> object:
        """Returns by how many pixels the page is wider than its window."""
        return self.run('const page = document.documentElement; return page.scrollWidth - page.clientWidth')

    def screenshot(self, path: Path) -> None:
        """Takes a screenshot of the window."""
        self.driver.save_screenshot(str(path))


@contextlib.contextmanager
def browser_or_skip(profile: Path, scripts: bool = True) -> Iterator[Browser]:
    """Yields a browser, or skips the test and names the missing program.

    Args:
        profile: an empty folder for the browser's files.
        scripts: whether pages may run scripts.
    """
    names = [os.environ.get('CHROME', ''), *CHROMIUM_NAMES]
    chromium = next((path for name in names if name and (path := shutil.which(name))), None)
    driver_path = shutil.which('chromedriver')
    if chromium is None or driver_path is None:
        missing = 'Chromium' if chromium is None else 'chromedriver'
        pytest.skip(
            f'no {missing} here, so nothing opens the page (Debian: apt install chromium chromium-driver)'
        )
    options = Options()
    options.binary_location = chromium
    for flag in (*FLAGS, f'--user-data-dir={profile}'):
        options.add_argument(flag)
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    if not scripts:
        options.add_experimental_option('prefs', {'profile.managed_default_content_settings.javascript': 2})
    # With a path, selenium does not search the network for a driver.
    driver = webdriver.Chrome(options=options, service=Service(executable_path=driver_path))
    try:
        driver.set_page_load_timeout(SECONDS)
        driver.set_script_timeout(SECONDS)
        yield Browser(driver)
    finally:
        with contextlib.suppress(WebDriverException):
            driver.quit()
