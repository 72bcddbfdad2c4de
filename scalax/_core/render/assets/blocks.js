// Features that scripts add to blocks, which are complete without them: sorting of tables and trees, filtering and
// opening of trees, zooming of timelines.
const COLLATOR = new Intl.Collator('en', { numeric: true });

function keyOf(cell) {
  const key = cell?.dataset.key;
  return key === undefined ? cell?.textContent ?? '' : key === '' ? NaN : Number(key);
}

// Compares numbers or texts in the direction of sign. NaN, the key of a cell without a number, is always last.
function compare(a, b, sign) {
  if (typeof a === 'string' || typeof b === 'string') return sign * COLLATOR.compare(a, b);
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
  return sign * (a - b);
}

// The first click on a heading sorts by its column (numbers in descending order), the second click reverses the order,
// the third one restores the original order.
function addSorting(heads, levels, cellOf) {
  let turn = 0;
  let last = -1;
  heads.forEach((head, column) => {
    if (!head.textContent) return;
    const button = document.createElement('button');
    button.type = 'button';
    button.append(...head.childNodes);
    head.append(button);
    const first = head.classList.contains('number') ? -1 : 1;
    button.addEventListener('click', () => {
      turn = column === last ? (turn + 1) % 3 : 0;
      last = column;
      const sign = [first, -first, 0][turn];
      for (const [parent, items] of levels) {
        const keys = new Map(items.map((item) => [item, keyOf(cellOf(item, column))]));
        const sorted = [...items].sort((a, b) => compare(keys.get(a), keys.get(b), sign));
        parent.append(...(sign ? sorted : items));
      }
      heads.forEach((other) => other.removeAttribute('aria-sort'));
      if (sign) head.setAttribute('aria-sort', sign < 0 ? 'descending' : 'ascending');
    });
  });
}

function enhanceTable(table) {
  const [body] = table.tBodies;
  const rows = [...body.rows];
  if (rows.length > 1) addSorting([...table.tHead.rows[0].cells], [[body, rows]], (row, column) => row.cells[column]);
}

// An item of a tree is a leaf, or a <details> whose first child is the row of a group.
const isItem = (element) => element.matches('details, div.row:not(.heads)');
const rowOf = (item) => (item.matches('details') ? item.firstElementChild : item);

function enhanceTree(tree) {
  const folds = [...tree.querySelectorAll('details')];
  const levels = [tree, ...folds].map((parent) => [parent, [...parent.children].filter(isItem)]);
  const leaves = levels.flatMap(([, items]) => items).filter((item) => !item.matches('details'));
  if (leaves.length < 2) return;
  const cellOf = (item, column) => rowOf(item).querySelectorAll(':scope > .name, :scope > .cell')[column];
  addSorting([...tree.querySelector('.heads').children], levels, cellOf);
  const tools = document.createElement('p');
  tools.className = 'tools';
  tools.append(...makeFilter(leaves, folds));
  for (const [text, isOpen] of folds.length > 1 ? [['Open all', true], ['Close all', false]] : []) {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = text;
    button.addEventListener('click', () => folds.forEach((fold) => { fold.open = isOpen; }));
    tools.append(button, ' ');
  }
  tree.before(tools);
}

// Returns the path of a row, and the texts of its cells without labels.
function textsOf(leaf) {
  const names = [];
  for (let item = leaf; isItem(item); item = item.parentElement) {
    names.unshift(rowOf(item).querySelector('.name').textContent);
  }
  const cells = [...leaf.querySelectorAll(':scope > .cell')].map((cell) =>
    [...cell.childNodes].filter((node) => !node.classList?.contains('label')).map((node) => node.textContent).join(''));
  return [names.join('/'), ...cells];
}

// Returns a function that tests whether a value contains the text, or matches it as a regular expression.
function tester(text) {
  const lowerCase = text.toLowerCase();
  let regex;
  try { regex = new RegExp(text, 'i'); } catch { regex = null; }
  return (value) => value.toLowerCase().includes(lowerCase) || Boolean(regex?.test(value));
}

function makeFilter(leaves, folds) {
  const box = document.createElement('input');
  const count = document.createElement('span');
  Object.assign(box, { type: 'search', placeholder: 'Filter', spellcheck: false, autocomplete: 'off' });
  box.setAttribute('aria-label', 'Filter rows by their text');
  count.setAttribute('role', 'status');
  const texts = new Map(leaves.map((leaf) => [leaf, textsOf(leaf)]));
  let before = null; // the open folds before filtering
  box.addEventListener('input', () => {
    before ??= new Map(folds.map((fold) => [fold, fold.open]));
    const test = tester(box.value);
    for (const leaf of leaves) leaf.hidden = !texts.get(leaf).some(test);
    for (const fold of [...folds].reverse()) { // inner folds first
      fold.hidden = [...fold.children].filter(isItem).every((item) => item.hidden);
      fold.open = box.value ? !fold.hidden : before.get(fold);
    }
    count.textContent = box.value ? `${leaves.filter((leaf) => !leaf.hidden).length} of ${leaves.length} rows` : '';
    if (!box.value) before = null;
  });
  return [box, ' ', count, ' '];
}

// Adds a slider that zooms a timeline around the middle of its visible part.
function enhanceTimeline(timeline) {
  const zoom = document.createElement('input');
  Object.assign(zoom, { type: 'range', min: 1, max: 40, step: 0.5, value: 1 });
  zoom.setAttribute('aria-label', 'Zoom');
  zoom.addEventListener('input', () => {
    const middle = (timeline.scrollLeft + timeline.clientWidth / 2) / timeline.scrollWidth;
    timeline.style.setProperty('--zoom', zoom.value);
    timeline.scrollLeft = middle * timeline.scrollWidth - timeline.clientWidth / 2;
  });
  const tools = document.createElement('p');
  tools.className = 'tools';
  const words = document.createElement('span');
  words.textContent = 'Zoom';
  tools.append(words, zoom);
  timeline.before(tools);
}

function enhance(blocks) {
  blocks.querySelectorAll('.timeline').forEach(enhanceTimeline);
  blocks.querySelectorAll('table.sortable').forEach(enhanceTable);
  blocks.querySelectorAll('.tree').forEach(enhanceTree);
}
