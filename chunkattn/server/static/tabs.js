/** The tabs, after WAI-ARIA's tab pattern. The address's hash keeps the open tab. */

const tabs = [...document.querySelectorAll("[role=tab]")];
const nameOf = (tab) => tab.id.replace("tab-", "");

function open(tab) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", String(chosen));
    each.tabIndex = chosen ? 0 : -1;
    document.getElementById(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  document.body.dataset.tab = nameOf(tab); // the style sheet hides the prompt's editor on tabs without a prompt
}

function openByAddress() {
  open(tabs.find((tab) => `#${nameOf(tab)}` === location.hash) ?? tabs[0]);
}

function choose(tab) {
  open(tab);
  history.replaceState(null, "", `#${nameOf(tab)}`);
}

export function setUpTabs() {
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const last = tabs.length - 1;
      const to = {
        ArrowRight: index === last ? 0 : index + 1,
        ArrowLeft: index === 0 ? last : index - 1,
        Home: 0,
        End: last,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      tabs[to].focus();
      choose(tabs[to]);
    });
  });
  window.addEventListener("hashchange", openByAddress);
  openByAddress();
}
