// What scripts add to blocks, which are whole without them: tables sort, and trees open and close as one.
const COLLATOR = new Intl.Collator('en', { numeric: true });

function keyOf(row, column) {
  const cell = row.cells[column];
  const key = cell?.dataset.key;
  return key === undefined ? cell?.textContent ?? '' : key === '' ? NaN : Number(key);
}

// Numbers from the largest down first, texts from A on; what has no number stays at the end either way.
function compare(one, other, sign) {
  if (typeof one === 'string' || typeof other === 'string') return sign * COLLATOR.compare(one, other);
  if (Number.isNaN(one) || Number.isNaN(other)) return Number.isNaN(one) - Number.isNaN(other);
  return sign * (one - other);
}

function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  const [body] = table.tBodies;
  const rows = [...body.rows];
  const orders = new Map();
  heads.forEach((head, column) => {
    if (!head.textContent || rows.length < 2) return;
    const button = document.createElement('button');
    button.type = 'button';
    button.append(...head.childNodes);
    head.append(button);
    const isNumber = head.classList.contains('number');
    button.addEventListener('click', () => {
      const sign = orders.has(column) ? -orders.get(column) : isNumber ? -1 : 1;
      orders.clear();
      orders.set(column, sign);
      const keys = new Map(rows.map((row) => [row, keyOf(row, column)]));
      body.append(...[...rows].sort((a, b) => compare(keys.get(a), keys.get(b), sign)));
      heads.forEach((each) => each.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', sign < 0 ? 'descending' : 'ascending');
    });
  });
}

function addTools(tree) {
  const folds = [...tree.querySelectorAll('details')];
  if (folds.length < 2) return;
  const tools = document.createElement('p');
  tools.className = 'tools';
  for (const [text, isOpen] of [['Open all', true], ['Close all', false]]) {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = text;
    button.addEventListener('click', () => folds.forEach((fold) => { fold.open = isOpen; }));
    tools.append(button, ' ');
  }
  tree.before(tools);
}

function enliven(blocks) {
  blocks.querySelectorAll('table.sortable').forEach(makeSortable);
  blocks.querySelectorAll('.tree').forEach(addTools);
}

function reveal(link) {
  const fold = link.length > 1 && document.getElementById(link.slice(1))?.querySelector('details');
  if (fold) fold.open = true;
}

// A link to a part that is folded opens it, before the browser goes there; so does the address of the page.
function followLinks(page) {
  page.addEventListener('click', (event) => {
    const link = event.target.closest('a')?.getAttribute('href');
    if (link?.startsWith('#')) reveal(link);
  });
  reveal(location.hash);
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

// In a notebook the blocks move into the shadow root, where their styles are; a page has both already.
function start(root) {
  const blocks = root.querySelector('.blocks');
  blocks.append(...root.host.querySelector('.scalax-static').childNodes);
  enliven(blocks);
}
